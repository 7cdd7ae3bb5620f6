"""`fastckpt verify`: reads every byte, and finds files that are not as they were saved."""

from typing import Any

import click

from fastckpt._core.config import Settings
from fastckpt._core.inspect.address import parse
from fastckpt._core.inspect.inventory import take
from fastckpt._core.inspect.verify import BAD, Finding, select, verify_all
from fastckpt._core.inspect.work_progress import WorkObserver
from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import FINDING, REMOTE, CommandOutput, Screen, answering, known
from fastckpt_run.cli.progress import observed


@click.command()
@click.argument("checkpoint", metavar="DIR[@STEP]")
@click.option("--all", "everything", is_flag=True, help="Compare every checkpoint of DIR.")
@REMOTE
@answering
@observed
def verify(checkpoint: str, everything: bool, remote: str, observer: WorkObserver) -> CommandOutput:
    """Read every byte of a checkpoint, and compare its digests.

    Each tier that has it is read. Without a step: the newest complete checkpoint, and all that is visibly damaged.
    Quarantined ones do not count. Exit code 1: something is bad.
    """
    address = parse(checkpoint)
    if everything and address.explicit:
        raise ConfigError(f"--all checks all checkpoints of a directory, but {checkpoint} names one")
    inventory = take(address.location, Settings.from_environment().arenas, remote)
    items = select(inventory, address, everything=everything)
    findings = verify_all(inventory, items, tracker=not address.explicit, observer=observer)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("good", "bad", "unknown")}
    document = {"directory": inventory.location, **counts, "findings": [_to_json(finding) for finding in findings]}

    def show(screen: Screen) -> None:
        screen.table([">STEP", ">HISTORY", "TIER", "VERDICT", "PATH"], [_row(finding) for finding in findings])
        for finding in findings:
            if finding.why:
                screen.line(f"{finding.verdict}: {finding.path}: {finding.why}")
        screen.line(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))

    return CommandOutput(document, show, FINDING if counts[BAD] else 0)


def _to_json(finding: Finding) -> dict[str, Any]:
    item = finding.item
    return {
        "step": item.step if item else None,
        "history": item.history if item else None,
        "tier": item.tier if item else "storage",
        "path": str(finding.path),
        "verdict": finding.verdict,
        "why": finding.why,
        "expected": finding.expected,
        "found": finding.found,
    }


def _row(finding: Finding) -> list[str]:
    item = finding.item
    where = [known(item.step), known(item.history), item.tier] if item else ["", "", "storage"]
    return [*where, finding.verdict, str(finding.path)]
