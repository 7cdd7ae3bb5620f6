"""The growth of checkpoints from step to step, and where it ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from statistics import linear_regression

FIRST_AND_LAST, LEAST_SQUARES = "first and last", "least squares"
STEADY = 0.001
"""Part of a checkpoint by which sizes may differ for other reasons than growth: a longer text, a larger number."""


@dataclass(frozen=True)
class SizeGrowth:
    """Growth of a checkpoint's bytes, as a straight line.

    Attributes:
        per_step: Bytes in each step; 0 if sizes do not change.
        step: The newest step that was measured.
        size: Bytes then.
        points: Checkpoints that were compared.
        method: `FIRST_AND_LAST` for two of them, `LEAST_SQUARES` for more.
    """

    per_step: float
    step: int
    size: int
    points: int
    method: str

    def reaches(self, size: int) -> int | None:
        """The last step at which a checkpoint still has at most ``size`` bytes; None if it does not grow."""
        if self.per_step <= 0:
            return None
        return self.step + floor((size - self.size) / self.per_step)


def size_growth(sizes: Mapping[int, int]) -> SizeGrowth | None:
    """The growth of checkpoints, from bytes by step; None for fewer than two steps.

    Of two steps it is the line through both; of more, that of least squares, of which the slope alone is used: it is
    extrapolated from the newest size.
    """
    if len(sizes) < 2:
        return None
    steps = sorted(sizes)
    slope = linear_regression(steps, [sizes[step] for step in steps]).slope
    if max(sizes.values()) - min(sizes.values()) <= STEADY * max(sizes.values()):
        slope = 0.0
    method = FIRST_AND_LAST if len(sizes) == 2 else LEAST_SQUARES
    return SizeGrowth(slope, steps[-1], sizes[steps[-1]], len(sizes), method)
