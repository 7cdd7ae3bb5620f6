"""Picture and table of how costs grow: a panel for each axis, a line with its exponent for each cost."""

import math
import statistics
from collections.abc import Sequence

from benchmarks.drawing import Drawing
from benchmarks.harness.page import shown
from benchmarks.harness.results import Run
from benchmarks.suite._growth_points import AXES, Axis, quantity, words
from benchmarks.suite._power_law import PowerLaw, fitted

WIDTH, HEIGHT = 330, 200
LABELS = 320
ROW = 290
LEFT, TOP = 60, 60


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
    """A row for each axis and cost: from the first point to the last, and the exponent, in each run."""
    titles = [f"{run.label or run.day}{', quick' if run.is_quick else ''}" for run in runs]
    lines = ["| what grows | cost | " + " | ".join(titles) + " |", "| --- " * (len(runs) + 2) + "|"]
    for axis in AXES:
        measured = [costs_of(run, axis) for run in runs]
        for cost in axis.costs:
            if any(cost in each for each in measured):
                cells = [_cell(each.get(cost, ())) for each in measured]
                lines.append(f"| {axis.title} | {words(cost)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(at: Sequence[tuple[float, float]]) -> str:
    if not at:
        return "-"
    (x0, y0), (x1, y1) = at[0], at[-1]
    return f"{_shown(y0)} at {x0:,g}, {_shown(y1)} at {x1:,g}: {exponent(fitted(at))}"


def _shown(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def drawn(run: Run) -> Drawing:
    """A panel for each axis, both scales logarithmic."""
    panels = [(axis, costs) for axis in AXES if (costs := costs_of(run, axis))]
    drawing = Drawing(2 * (LEFT + WIDTH + LABELS), TOP + ROW * math.ceil(len(panels) / 2), "Costs as things grow")
    drawing.text(20, 28, "Costs as things grow: seconds, with the exponent beyond a constant", "strong")
    for number, (axis, costs) in enumerate(panels):
        column, row = number % 2, number // 2
        _panel(drawing, (LEFT + column * (LEFT + WIDTH + LABELS), TOP + row * ROW), axis, costs)
    return drawing


def _panel(
    drawing: Drawing, corner: tuple[float, float], axis: Axis, costs: dict[str, list[tuple[float, float]]]
) -> None:
    left, top = corner
    low = math.floor(min(math.log10(y) for at in costs.values() for _, y in at))
    high = math.ceil(max(math.log10(y) for at in costs.values() for _, y in at))
    xs = sorted({x for at in costs.values() for x, _ in at})

    def place(x: float, y: float) -> tuple[float, float]:
        along = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        return left + along * WIDTH, top + HEIGHT * (1 - (math.log10(y) - low) / (high - low))

    drawing.text(left, top - 8, axis.title, "strong")
    for power in range(low, high + 1):
        y = place(xs[0], 10.0**power)[1]
        drawing.line([(left, y), (left + WIDTH, y)], "line dashed")
        drawing.text(left - 6, y + 4, shown(10.0**power), "small end")
    for x in xs:
        drawing.text(place(x, 1.0)[0], top + HEIGHT + 18, f"{x:,g}", "small middle")
    ends = sorted((place(*at[-1])[1], cost) for cost, at in costs.items())
    previous = -math.inf
    for _, cost in ends:
        points = [place(*point) for point in costs[cost]]
        label = f"{words(cost)}: {exponent(fitted(costs[cost]))}"
        previous = drawing.labelled_line(points, left + WIDTH + 8, previous, label)
