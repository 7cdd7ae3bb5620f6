"""Table of ways to save: what training waits, until the save is durable, and each as a ratio to its limit."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.harness.page import shown
from benchmarks.harness.results import Run

LIMITS = "limits"


def tabled(runs: Sequence[Run], ways: Iterable[str]) -> str:
    """A row for each way of the newest run: it and the one before, and the ratio of the newest to its limit."""
    newest = [*reversed(runs[-2:])]
    columns = ["way", "blocked, s", "blocked / warm copy", "durable, s", "durable / bare write"]
    rows = [_row(newest, name) for name in ways if newest[0].values(f"{name}.blocked")]
    return "\n".join([f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *rows])


def _row(runs: Sequence[Run], name: str) -> str:
    cells = [name]
    for what, limit in (("blocked", "copy"), ("durable", "write")):
        ours, theirs = runs[0].values(f"{name}.{what}"), runs[0].values(f"{LIMITS}.{limit}")
        medians = [shown(statistics.median(found)) for run in runs if (found := run.values(f"{name}.{what}"))]
        cells.append(", ".join(medians) or "-")
        cells.append(f"{statistics.median(ours) / statistics.median(theirs):.2f}" if ours and theirs else "-")
    return f"| {' | '.join(cells)} |"
