"""Table of how costs grow: for each axis the cost that grows most."""

import statistics
from collections.abc import Sequence

from benchmarks.harness.results import Run
from benchmarks.suite.growth._growth_points import AXES, Axis, quantity, words
from benchmarks.suite.growth._power_law import PowerLaw, fitted

LIMITS = {"copy", "write"}
"""Contenders that costs are compared with."""


def costs_of(run: Run, axis: Axis) -> dict[str, list[tuple[float, float]]]:
    """The medians of each cost that was measured at two points or more, by point."""
    found = {}
    for cost in axis.costs:
        at = [(x, run.values(f"{axis.name}.{quantity(cost, x)}")) for x in axis.points]
        medians = [(x, statistics.median(values)) for x, values in at if values]
        if len(medians) > 1:
            found[cost] = medians
    return found


def exponent(law: PowerLaw) -> str:
    """The exponent in words."""
    return f"exponent {law.exponent:.2g}" if law.factor else "flat"


def tabled(runs: Sequence[Run]) -> str:
    """A row for each axis, from the newest run that has it: the cost that grows with the largest exponent."""
    lines = ["| what grows | costs | with the largest exponent | from, to |", "| --- " * 4 + "|"]
    for axis in AXES:
        costs = next((found for run in reversed(runs) if (found := costs_of(run, axis))), {})
        laws = {cost: fitted(at) for cost, at in costs.items() if cost not in LIMITS}
        if laws:
            cost = max(laws, key=lambda each: laws[each].exponent)
            ends = ", ".join(f"{_shown(y)} at {x:,g}" for x, y in (costs[cost][0], costs[cost][-1]))
            name = f"{words(cost)}: {exponent(laws[cost])}" if laws[cost].exponent else "all flat"
            lines.append(f"| {axis.title} | {len(laws)} | {name} | {ends if laws[cost].exponent else '-'} |")
    return "\n".join(lines)


def _shown(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
