"""`fastckpt report`: the events of all launches of a job, and the causes of its lost time."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastckpt._core.config import Settings
from fastckpt._core.inspect.inventory import InventoryItem, is_gone, take
from fastckpt._core.storage.store import is_url
from fastckpt_run.cli.output import REMOTE, CommandOutput, Screen, answering, describe

if TYPE_CHECKING:
    from fastckpt._core.report.offloaded_ranks import OffloadedRank
    from fastckpt._core.report.report import Recovery, Report
    from fastckpt._core.report.slow_spells import SlowSpell

INSTANTS = ("stopped", "relaunched", "met", "started", "imported", "joined", "resumed", "first_step")
"""Phases that follow a failure, in this order."""


@click.command()
@click.argument("directory", metavar="DIR")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with a chart, which needs no network."
)
@REMOTE
@answering
def report(directory: str, html: Path | None, remote: str) -> CommandOutput:
    """Report on all launches with DIR: goodput, lost time, failures.

    It reads the event logs in DIR, or one FILE of --fast-events; a job may run meanwhile. docs/reference/events.md
    defines all figures. Stores have no logs: of a URL, or with --remote, it reports the checkpoints there.
    """
    # Imported here: `fastckpt --help` and the other commands must not wait for it.
    from fastckpt._core.report.events import find, read
    from fastckpt._core.report.report import report as report_on

    held = _held(remote or directory) if remote or is_url(directory) else None
    logs = [] if held and (is_url(directory) or is_gone(directory)) else [read(path) for path in find(directory)]
    found = report_on(logs)
    if html is not None:
        from fastckpt_run.views.page import page

        html.write_text(page(found, directory), encoding="utf-8")
    document = _document(found) | {"directory": directory, "logs": [str(log.path) for log in logs]}
    document["remote"] = held and {**asdict(held), "newest": held.newest and describe(held.newest)}

    def show(screen: Screen) -> None:
        from fastckpt_run.views import report_text

        if html is not None:
            screen.line(f"written to {html}")
        else:
            report_text.show(screen, found, directory)
        if held is not None:
            newest = f"; the newest is {held.newest.id}: {held.newest.path}" if held.newest else ""
            screen.line(f"{held.location} holds {held.checkpoints:,} whole checkpoints{newest}")
        if held is not None and not logs:
            screen.line("No log of launches is there: give the directory itself, or the file of --fast-events")

    return CommandOutput(document, show)


@dataclass(frozen=True)
class Held:
    """Content of a store: the number of whole checkpoints, and the newest of them."""

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
    return {
        "goodput": found.goodput,
        "total": found.total / 1e9,
        "time": {cause: spent / 1e9 for cause, spent in found.lost.items()},
        "steps": {
            "new": found.steps.new,
            "repeated": found.steps.repeated,
            "per_second": found.steps_per_second,
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
        "hosts": [asdict(one) for one in found.hosts],
        "decisions": [asdict(one) | {"at": one.at / 1e9} for one in found.decisions],
        "superseded": [asdict(one) | {"at": one.at / 1e9} for one in found.superseded],
        "slow_ranks": [_slow(one) for one in found.slow],
        "offloaded": [_offloaded(one) for one in found.offloaded],
        "metrics": [asdict(one) | {"at": one.at / 1e9} for one in found.metrics],
        "checkpoints": counts | {"persist_time": counts["persist_time"] / 1e9},
        "unreadable": found.unreadable,
        "events_lost": found.events_lost,
    }


def _slow(one: "SlowSpell") -> dict[str, Any]:
    return asdict(one) | {"begin": one.begin / 1e9, "end": None if one.end is None else one.end / 1e9}


def _offloaded(one: "OffloadedRank") -> dict[str, Any]:
    document = asdict(one) | {"ends": [asdict(end) | {"at": end.at / 1e9} for end in one.ends]}
    for name in ("waited_for_writes", "waited_for_reads", "predicted_wait", "step_wait"):
        document[name] = None if document[name] is None else document[name] / 1e9
    return document


def _failure(one: "Recovery") -> dict[str, Any]:
    document = asdict(one) | {"at": one.at / 1e9, "silent": one.silent / 1e9}
    if one.awaited is not None:
        del document["awaited"]["at"]
    for name in (*INSTANTS, "load"):
        document[name] = None if document[name] is None else document[name] / 1e9
    return document
