"""The useful part of a large job's time by scheme of copies, simulated."""

import statistics
from collections.abc import Sequence
from functools import partial
from math import inf, log

from benchmarks.harness.benchmark import Benchmark, Contender, Values
from benchmarks.harness.drawing import Drawing
from benchmarks.harness.results import Run
from benchmarks.harness.turn import Turn
from benchmarks.suite.nodes._simulated_job import CASES, DAY, GPUS, SCHEMES, Case, Scheme, SimulatedJob

SIZES = (8, 128, 1024, 4096, 16384)
DAYS = 60.0


def quantity(case: Case, gpus: int) -> str:
    """The name of a useful part."""
    return f"{case.title} at {gpus}"


def simulate(scheme: Scheme, turn: Turn) -> Values:
    """One job of each case and size; what is random comes from the number of the round."""
    sizes = SIZES[:-2] if turn.is_quick else SIZES
    found = {}
    for case in CASES:
        for gpus in sizes:
            job = SimulatedJob(max(1, gpus // GPUS), scheme, case, turn.number)
            found[quantity(case, gpus)] = job.run(DAYS * DAY).useful
    return found


def useful(run: Run, scheme: Scheme, case: Case, gpus: int) -> float | None:
    """The mean over all rounds."""
    values = run.values(f"{scheme.title}.{quantity(case, gpus)}")
    return statistics.mean(values) if values else None


def table(runs: Sequence[Run]) -> str:
    """A row for each scheme at the largest size, a column for each case."""
    run = runs[-1]
    size = max(gpus for gpus in SIZES if useful(run, SCHEMES[0], CASES[0], gpus))
    lines = [f"| {size:,} GPUs | {' | '.join(case.title for case in CASES)} |", "| --- " * (len(CASES) + 1) + "|"]
    for scheme in SCHEMES:
        cells = [f"{useful(run, scheme, case, size) or 0.0:.1%}" for case in CASES]
        lines.append(f"| {scheme.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


WIDTH, HEIGHT, LEFT, TOP, LABELS = 240, 260, 60, 70, 290


def picture(run: Run) -> Drawing:
    """The useful part of the time by the number of GPUs: a line for each scheme, a panel for each case."""
    drawing = Drawing(len(CASES) * (LEFT + WIDTH + LABELS) + 10, TOP + HEIGHT + 60, "Useful time by size and scheme")
    drawing.text(20, 28, "Useful part of a simulated job's time, by GPUs and scheme", "strong")
    for number, case in enumerate(CASES):
        _panel(drawing, LEFT + number * (LEFT + WIDTH + LABELS), case, run)
    return drawing


def _panel(drawing: Drawing, left: float, case: Case, run: Run) -> None:
    found = {each: [(n, value) for n in SIZES if (value := useful(run, each, case, n))] for each in SCHEMES}
    least = int(min(value for line in found.values() for _, value in line) * 10) / 10

    def at(gpus: int, value: float) -> tuple[float, float]:
        along = log(gpus / SIZES[0]) / log(SIZES[-1] / SIZES[0])
        return left + along * WIDTH, TOP + HEIGHT * (1 - value) / (1 - least)

    drawing.text(left, TOP - 14, case.title, "strong")
    for tenth in range(round(least * 10), 11):
        _, y = at(SIZES[0], tenth / 10)
        drawing.line([(left, y), (left + WIDTH, y)], "line dashed")
        drawing.text(left - 6, y + 4, f"{tenth / 10:.0%}", "small end")
    for gpus in SIZES:
        drawing.text(at(gpus, 1.0)[0], TOP + HEIGHT + 18, f"{gpus:,}", "small middle")
    label = -inf
    for scheme, line in sorted(found.items(), key=lambda each: -each[1][-1][1]):
        kind = "line lost" if scheme == SCHEMES[0] else "line"
        text = f"{scheme.title}: {line[-1][1]:.1%}"
        label = drawing.labelled_line([at(*each) for each in line], left + WIDTH + 8, label, text, kind)


BENCHMARK = Benchmark(
    name="large_jobs",
    question="What part of a large job's time is useful, by scheme of copies?",
    work="A simulation of 60 days on nodes of 16 GPUs. It runs the product's rules with assumed failures (3.8 of 1,000 "
    "nodes a day; `Assumed` has all assumptions and sources). Means of 8 runs.",
    contenders=[Contender(scheme.title, partial(simulate, scheme)) for scheme in SCHEMES],
    rounds=8,
    gigabytes=0.0,
    picture=picture,
    table=table,
)
