"""`fastckpt which`: the checkpoint that a resume would take, and why no other one."""

from typing import Any

import click

from fastckpt._core.config import Settings
from fastckpt._core.inspect.inventory import take
from fastckpt._core.inspect.which import REFUSE, decide
from fastckpt._core.inspect.work_progress import WorkObserver
from fastckpt_run.cli.ls import in_words, jobs, none_of_ours
from fastckpt_run.cli.output import FINDING, REMOTE, CommandOutput, Screen, answering, describe, known
from fastckpt_run.cli.progress import observed


@click.command()
@click.argument("directory", metavar="DIR")
@REMOTE
@click.option("--verify", "verifies", is_flag=True, help="Also compare digests, as a resume does, and skip bad ones.")
@answering
@observed
def which(directory: str, remote: str, verifies: bool, observer: WorkObserver) -> CommandOutput:
    """Show which checkpoint of DIR a launch on this node would resume.

    The others are listed with the reason. The launch has as many ranks as saved. Exit code 1: checkpoints exist,
    but none can be loaded.
    """
    inventory = take(directory, Settings.from_environment().arenas, remote)
    decision = decide(inventory, verifies=verifies, observer=observer)
    document: dict[str, Any] = {
        "directory": inventory.location,
        "outcome": decision.outcome,
        "choice": describe(decision.choice) if decision.choice else None,
        "others": [{**describe(item), "why": why} for item, why in decision.others],
        "jobs": jobs(inventory),
    }

    def show(screen: Screen) -> None:
        screen.line(_in_words(decision.outcome, document["choice"]))
        for line in none_of_ours(inventory) if inventory.foreign else ():
            screen.line(line)
        if decision.others:
            rows = [[known(item.step), known(item.history), item.tier, why] for item, why in decision.others]
            screen.table([">STEP", ">HISTORY", "TIER", "WHY NOT"], rows)
        for job in document["jobs"]:
            screen.line(f"{in_words(job)}: until it has ended, another launch is refused")

    return CommandOutput(document, show, FINDING if decision.outcome == REFUSE else 0)


def _in_words(outcome: str, choice: Any) -> str:
    if choice:
        return f"resume step {choice['step']} of history {choice['history']} from {choice['tier']}: {choice['path']}"
    return "refuse to start: checkpoints exist, but none can be loaded" if outcome == REFUSE else "start fresh"
