"""`fastckpt prune`: removes checkpoints on storage that need not be kept."""

from typing import Any

import click

from fastckpt.config import Settings
from fastckpt.policy.retention import KeepAll, KeepAny, KeepEvery, KeepEveryMinutes, KeepLast, Policy, to_json
from fastckpt.sizes import decimal
from fastckpt.tools.inventory import take
from fastckpt.tools.prune import delete, divide, keep_best
from fastckpt_run.cli.answer import Answer, Screen, answering, describe, known
from fastckpt_run.cli.ls import in_words, jobs


@click.command()
@click.argument("directory", metavar="DIR")
@click.option("--keep-last", type=int, metavar="N", help="Keep the newest N.")
@click.option("--keep-every", type=int, metavar="K", help="Keep steps that are multiples of K.")
@click.option("--keep-minutes", type=float, metavar="T", help="Keep the first of each period of T minutes.")
@click.option("--keep-best", metavar="N:METRIC[:max]", help="Keep the N with the smallest (max: largest) metric.")
@click.option("--drop-history", type=int, metavar="H", multiple=True, help="Keep nothing of history H; also repeated.")
@click.option("--yes", is_flag=True, help="Delete; without it, only tell what would be deleted.")
@answering
def prune(
    directory: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_minutes: float | None,
    keep_best: str | None,
    drop_history: tuple[int, ...],
    yes: bool,
) -> Answer:
    """Delete the checkpoints on storage that none of the options keeps; by default, only tell which.

    The newest whole checkpoint is never deleted, nor is what is damaged or in quarantine. Histories that the newest
    did not resume from are judged apart: of each the newest is kept, unless --drop-history names it. This is safe
    beside a running job: each deletion tells its sweeps to keep off, and is whole or not at all.
    """
    policies = _policies(keep_last, keep_every, keep_minutes, keep_best)
    inventory = take(directory, Settings.from_environment().arenas)
    kept, others = divide(inventory, policies, drop_history)
    if yes:
        delete(inventory, others)
    document: dict[str, Any] = {
        "directory": inventory.location,
        "policy": to_json(KeepAny(tuple(policies) or (KeepAll(),))),
        "done": yes,
        "keep": [describe(item) for item in kept],
        "delete": [describe(item) for item in others],
        "freed": sum(item.size for item in others),
        "jobs": jobs(inventory),
    }

    def show(screen: Screen) -> None:
        verb = "deleted" if yes else "delete"
        rows = sorted(
            [(item, verb) for item in others] + [(item, "keep") for item in kept], key=lambda r: r[0].age_order
        )
        cells = [
            [known(item.step), known(item.history), decimal(item.size), what, str(item.path)] for item, what in rows
        ]
        screen.table([">STEP", ">HISTORY", ">SIZE", "WHAT", "PATH"], cells)
        freed = decimal(sum(item.size for item in others))
        screen.line(f"{len(others)} deleted, {freed} freed" if yes else f"{freed} to free; --yes deletes")
        for job in document["jobs"]:
            screen.line(in_words(job))

    return Answer(document, show)


def _policies(last: int | None, every: int | None, minutes: float | None, best: str | None) -> list[Policy]:
    policies: list[Policy] = []
    if last is not None:
        policies.append(KeepLast(last))
    if every is not None:
        policies.append(KeepEvery(every))
    if minutes is not None:
        policies.append(KeepEveryMinutes(minutes))
    if best is not None:
        policies.append(keep_best(best))
    return policies
