"""Definitions of a benchmark: its question, who takes part, and which figures answer it."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from benchmarks.harness.drawing import Drawing

if TYPE_CHECKING:
    from benchmarks.harness.results import Run
    from benchmarks.harness.turn import Turn

Values = Mapping[str, float | Sequence[float]]
"""Measurements of a contender in one turn, by quantity: one value, or several of the same kind."""


def available() -> str:
    """Return no reason against taking part."""
    return ""


@dataclass(frozen=True)
class Contender:
    """One way to do the work that a benchmark asks about.

    Args:
        name: As it stands in tables: "fastckpt", "torch.save", "warm copy".
        measure: Does the work of one turn, in a fresh process, and gives what it measured.
        missing: Gives the reason for which it cannot run here; it is listed with that reason instead.
        quick: True if it takes part in ``--quick``.
    """

    name: str
    measure: Callable[["Turn"], Values]
    missing: Callable[[], str] = available
    quick: bool = True


@dataclass(frozen=True)
class Goal:
    """A bound that a figure should keep, and in how many of ten runs (10: in all)."""

    kind: Literal["at most", "at least"]
    bound: float
    of_ten: int = 10

    def is_met(self, value: float) -> bool:
        """Return whether a value keeps the bound."""
        return value <= self.bound if self.kind == "at most" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.kind} {self.bound:g}" + (f" in {self.of_ten} of 10" if self.of_ten < 10 else "")


@dataclass(frozen=True)
class Figure:
    """A row of the table: a quantity of a contender, alone or as a ratio to that of another one.

    Args:
        what: The row's name.
        of: "CONTENDER.QUANTITY".
        to: The same of a limit or a peer; the figure is then the ratio of medians, pair by pair in each round.
        goal: Value to be reached; None where it is only shown.
        unit: Of the quantity.
        scale: Factor of a value for the unit.
        is_detail: True if it is printed with a run, and left out of the page.
    """

    what: str
    of: str
    to: str = ""
    goal: Goal | None = None
    unit: str = "s"
    scale: float = 1.0
    is_detail: bool = False

    def values(self, run: "Run") -> list[float]:
        """The figure in each round of a run; empty if one of its sides did not take part."""
        if not self.to:
            return [self.scale * statistics.median(v) for v in run.rounds(self.of).values()]
        ours, theirs = run.rounds(self.of), run.rounds(self.to)
        return [
            statistics.median(ours[number]) / statistics.median(theirs[number])
            for number in sorted(ours.keys() & theirs)
        ]


@dataclass(frozen=True)
class Benchmark:
    """A question about costs, answered by contenders that take turns.

    Args:
        name: Of its module, and of its file of results.
        question: One sentence that ends with a question mark.
        work: Work of each contender, in one or two sentences: state, sizes, what is excluded.
        contenders: In the order of the table; in each round they take turns, beginning with another one.
        figures: Rows of the table.
        rounds: Number of turns of each contender.
        gigabytes: Size of the state; ``--quick`` takes a tenth of it, but not less than 0.1. 0 where it has its own.
        picture: Draws the results, for docs/images.
        table: Gives Markdown in place of the usual table, from whole runs, oldest first.
    """

    name: str
    question: str
    work: str
    contenders: Sequence[Contender]
    figures: Sequence[Figure] = field(default_factory=tuple)
    rounds: int = 3
    gigabytes: float = 1.5
    picture: "Callable[[Run], Drawing] | None" = None
    table: "Callable[[Sequence[Run]], str] | None" = None

    def __post_init__(self) -> None:
        names = {contender.name for contender in self.contenders}
        for figure in self.figures:
            for side in filter(None, (figure.of, figure.to)):
                if side.rpartition(".")[0] not in names:
                    raise ValueError(f"figure {figure.what!r} of {self.name}: no contender is called {side!r}")
