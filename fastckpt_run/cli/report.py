"""`fastckpt report`: what happened in all launches of a job, and where the time went."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastckpt._core.config import Settings
from fastckpt._core.inspect.inventory import InventoryItem, is_gone, take
from fastckpt._core.storage.store import is_url
from fastckpt_run.cli.output import REMOTE, CommandOutput, Screen, answering, describe

if TYPE_CHECKING:
    from fastckpt._core.report.report import Recovery, Report

INSTANTS = ("stopped", "relaunched", "met", "started", "imported", "joined", "resumed", "first_step")
"""What follows a failure, in this order."""


@click.command()
@click.argument("directory", metavar="DIR")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write it to FILE as a page, with a chart."
)
@REMOTE
@answering
def report(directory: str, html: Path | None, remote: str) -> CommandOutput:
    """Report what happened in all launches with DIR: goodput, lost time by cause, failures, saves and persists.

    It reads the event logs that agents leave in DIR; instead of DIR, FILE is one that --fast-events wrote. A job may
    run meanwhile. docs/events.md defines all figures. No logs are in a store: of a URL, or with --remote, it reports
    what that holds, and DIR may be lost.
    """
    from fastckpt._core.report.events import find, read
    from fastckpt._core.report.report import report as report_on

    held = _held(remote or directory) if remote or is_url(directory) else None
    logs = [] if held and (is_url(directory) or is_gone(directory)) else [read(path) for path in find(directory)]
    found = report_on(logs)
    if html is not None:
        from fastckpt_run.cli.page import page

        html.write_text(page(found, directory), encoding="utf-8")
    document = _document(found) | {"directory": directory, "logs": [str(log.path) for log in logs]}
    document["remote"] = held and {**asdict(held), "newest": held.newest and describe(held.newest)}

    def show(screen: Screen) -> None:
        if html is not None:
            screen.line(f"written to {html}")
        else:
            _show(screen, found, directory)
        if held is not None:
            newest = f"; the newest is {held.newest.id}: {held.newest.path}" if held.newest else ""
            screen.line(f"{held.location} holds {held.checkpoints:,} whole checkpoints{newest}")
        if held is not None and not logs:
            screen.line("No log of launches is there: give the directory itself, or the file of --fast-events")

    return CommandOutput(document, show)


@dataclass(frozen=True)
class Held:
    """What a store holds: how many whole checkpoints, and the newest of them."""

    location: str
    checkpoints: int
    newest: InventoryItem | None


def _held(location: str) -> Held:
    whole = take(location, Settings.from_environment().arenas).whole
    stored = [item for item in whole if item.tier == "storage"]
    return Held(location, len(stored), stored[0] if stored else None)


def _document(found: "Report") -> dict[str, Any]:
    """A report as JSON; all times in seconds."""
    counts = asdict(found.counts)
    useful = found.lost["useful"]
    return {
        "goodput": found.goodput,
        "total": found.total / 1e9,
        "time": {cause: spent / 1e9 for cause, spent in found.lost.items()},
        "steps": {
            "new": found.steps.new,
            "repeated": found.steps.repeated,
            "per_second": found.steps.new * len(found.nodes) * 1e9 / useful if useful else None,
        },
        "launches": [
            {
                "node": node,
                "host": placed.launch.host,
                "pid": placed.launch.pid,
                "run_id": placed.launch.run_id,
                "script": placed.launch.script,
                "begin": placed.begin / 1e9,
                "seconds": (placed.end - placed.begin) / 1e9,
                "starts": sum(one.started is not None for one in placed.launch.rounds),
                "outcome": placed.launch.outcome or None,
            }
            for node, chain in found.nodes.items()
            for placed in chain
        ],
        "failures": [_failure(one) for one in found.failures],
        "decisions": [asdict(one) | {"at": one.at / 1e9} for one in found.decisions],
        "superseded": [asdict(one) | {"at": one.at / 1e9} for one in found.superseded],
        "checkpoints": counts | {"persist_time": counts["persist_time"] / 1e9},
        "unreadable": found.unreadable,
        "events_lost": found.events_lost,
    }


def _failure(one: "Recovery") -> dict[str, Any]:
    document = asdict(one) | {"at": one.at / 1e9, "silent": one.silent / 1e9}
    for name in (*INSTANTS, "load"):
        document[name] = None if document[name] is None else document[name] / 1e9
    return document


def _show(screen: Screen, found: "Report", directory: str) -> None:
    from fastckpt_run import formatting
    from fastckpt_run.cli.report_text import SHOWN, change, facts

    launches = sum(len(chain) for chain in found.nodes.values())
    if not launches:
        screen.line(f"{directory}: no launch of fastckpt-run is logged; under torchrun there is no agent that logs")
        return
    screen.line(
        f"{directory}: {formatting.count(launches, 'launch', 'launches')} "
        f"on {formatting.count(len(found.nodes), 'node')}, "
        f"{formatting.duration(found.total)}; goodput {formatting.goodput(found.goodput)}"
    )
    causes = [(cause, spent) for cause, spent in found.lost.items() if spent]
    rows = [
        [formatting.CAUSES[cause], formatting.share(spent, found.total), formatting.duration(spent)]
        for cause, spent in causes
    ]
    screen.table(["CAUSE", ">SHARE", ">TIME"], rows)
    for line in facts(found):
        screen.line(line)
    start = min(placed.begin for chain in found.nodes.values() for placed in chain)
    if changes := [one for one in found.decisions if one.matters]:
        screen.table(
            [">AT", ">AFTER STEP", ">SNAPSHOT", ">PERSIST", ">COST", "WHY"],
            [change(one, start) for one in changes[-SHOWN:]],
        )
        if len(changes) > SHOWN:
            screen.line(f"{formatting.count(len(changes) - SHOWN, 'earlier change')} not shown; --json has all")
    if found.failures:
        screen.table(
            ["FAILURE", *(f">{name}" for name in _HEADS)],
            [_row(one, start, len(found.nodes)) for one in found.failures],
        )
        for one in found.failures:
            if one.log:
                screen.line(f"rank {one.rank}, {formatting.duration(one.at - start)}: {formatting.where(one)}")


_SHOWN = ("stopped", "met", "started", "imported", "joined", "resumed", "first_step")
_HEADS = ("AT", "STOPPED", "MET", "STARTED", "IMPORTED", "JOINED", "RESUMED", "FIRST STEP", "STEP", "FROM", "REPEATED")


def _row(one: "Recovery", start: int, nodes: int) -> list[str]:
    from fastckpt_run import formatting

    instants = [formatting.duration(getattr(one, name)) for name in _SHOWN]
    step = "?" if one.step is None else "none" if one.step < 0 else str(one.step)
    return [
        formatting.failure(one, nodes=nodes),
        formatting.duration(one.at - start),
        *instants,
        step,
        one.tier or "-",
        str(one.repeated),
    ]
