"""The unit of the steps of a job, in which the line of a restart, the report, the page and the metrics count them."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.report.launches import Sample

Progress = Telemetry | Sample


@dataclass(frozen=True)
class StepUnit:
    """Counts steps as workers do, or as the script numbers its saves, whichever are the smaller.

    Both are one where the script names each step to its checkpointer. Else workers count those of optimizers, of which
    a save may follow several, as with two optimizers, or none, as where gradients are accumulated.

    Attributes:
        per_step: Steps that workers count for one of the script's.
    """

    per_step: Fraction = Fraction(1)

    @classmethod
    def of(cls, stretches: Iterable[tuple[int, int]]) -> Self:
        """The unit by stretches of the way, each in steps of the script, and as counted: the longest shows it best."""
        script, counted = max(stretches, default=(0, 0))
        return cls(Fraction(counted, script)) if script > 0 < counted else cls()

    def before(self, step: int, since: int = 0) -> int:
        """The number of steps before a step of the script; ``since`` are those that workers have counted after it."""
        if self.per_step == 1:
            return max(0, step) + since  # the same, without fractions
        return int((max(0, step) * self.per_step + since) / min(Fraction(1), self.per_step))

    def reached(self, last: Progress) -> int:
        """The number of steps before the point at which a worker is."""
        return self.before(last.step, last.steps - last.named)

    def number(self, last: Progress) -> int:
        """The step that a worker has completed, as the script numbers its saves."""
        return max(0, last.step) + int((last.steps - last.named) / self.per_step)


def stretch(last: Progress) -> tuple[int, int]:
    """The way of a worker from its begin to the last step it named: in steps of the script, and as it counted them."""
    # A script whose first step is 0 has done one more at a fresh start than the number of its step.
    begin = last.loaded if last.named == last.step + 1 else max(0, last.loaded)
    return last.step - begin, last.named
