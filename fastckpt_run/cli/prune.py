"""`fastckpt prune`: removes checkpoints on storage that need not be kept."""

from collections.abc import Callable
from typing import Any

import click

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.config import Settings
from fastckpt._core.inspect.inventory import is_gone, take
from fastckpt._core.inspect.prune import delete, divide
from fastckpt._core.inspect.prune import keep_best as best_of
from fastckpt._core.inspect.work_progress import WorkObserver
from fastckpt._core.policy.retention import KeepAll, KeepAny, KeepEvery, KeepEveryMinutes, KeepLast, Policy, to_json
from fastckpt._core.storage.store import normalised
from fastckpt_run.cli.ls import in_words, jobs
from fastckpt_run.cli.output import REMOTE, CommandOutput, Screen, answering, describe, known
from fastckpt_run.cli.progress import observed

_POLICIES: dict[str, Callable[[Any], Policy]] = {
    "keep_last": KeepLast,
    "keep_every": KeepEvery,
    "keep_minutes": KeepEveryMinutes,
    "keep_best": best_of,
}


@click.command()
@click.argument("directory", metavar="DIR")
@click.option("--keep-last", type=int, metavar="N", help="Keep the newest N.")
@click.option("--keep-every", type=int, metavar="K", help="Keep steps that are multiples of K.")
@click.option("--keep-minutes", type=float, metavar="T", help="Keep the first of every T minutes.")
@click.option("--keep-best", metavar="N:METRIC[:max]", help="Keep the N smallest (max: largest) by a metric.")
@click.option("--drop-history", type=int, metavar="H", multiple=True, help="Keep nothing of history H; repeatable.")
@REMOTE
@click.option("--yes", is_flag=True, help="Delete.")
@answering
@observed
def prune(
    directory: str, drop_history: tuple[int, ...], remote: str, yes: bool, observer: WorkObserver, **keep: Any
) -> CommandOutput:
    """Delete the checkpoints on storage that no option keeps.

    Without --yes they are only listed. The newest complete checkpoint stays, as do damaged and quarantined ones.
    Histories that the newest did not resume from keep their own newest one. A job may run meanwhile. With --remote,
    DIR and the store are pruned separately.
    """
    policies = [policy(keep[name]) for name, policy in _POLICIES.items() if keep[name] is not None]
    inventory = take(directory, Settings.from_environment().arenas, remote)
    places = {"storage": inventory.location} | ({"remote": normalised(remote)} if remote else {})
    if is_gone(directory):
        # A directory that is gone has nothing to prune: with --remote the store alone is.
        places.pop("storage")
    # 1. read all tiers once   2. divide checkpoints by the policies   3. delete, with --yes   4. show both
    divided = {tier: divide(inventory, policies, drop_history, tier=tier) for tier in places}
    for tier, (_, obsolete) in divided.items() if yes else ():
        delete(places[tier], obsolete, observer)
    kept, others = ([item for parts in divided.values() for item in parts[i]] for i in (0, 1))
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

    return CommandOutput(document, show)
