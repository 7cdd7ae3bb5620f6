"""Fits how a cost grows: a constant, and a power of what grows."""

import math
from collections.abc import Sequence
from typing import NamedTuple

FLAT = 0.5
"""A cost that grows by less than this share of its constant, over the whole axis, is flat: less is noise."""
EXPONENTS = [number / 20 for number in range(1, 61)]


class PowerLaw(NamedTuple):
    """``constant + factor * x ** exponent``; the exponent of a flat cost is 0."""

    constant: float
    factor: float
    exponent: float

    def at(self, x: float) -> float:
        """The cost at a point."""
        return float(self.constant + self.factor * x**self.exponent)


def fitted(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """The law that is closest to positive costs at points, by the least squares of relative errors.

    Two points have a law without a constant: a third one is needed to tell one from the other.
    """
    if len(points) < 2:
        raise ValueError(f"{len(points)} point tells nothing of growth; give 2 or more")
    if len(points) == 2:
        (x0, y0), (x1, y1) = points
        exponent = math.log(y1 / y0) / math.log(x1 / x0)
        return PowerLaw(0.0, y0 / x0**exponent, exponent) if y1 > y0 * (1 + FLAT) else _flat(points)
    best = min((_of_exponent(points, exponent) for exponent in EXPONENTS), key=lambda law: _error(points, law))
    grown = best.at(max(x for x, _ in points)) - (least := best.at(min(x for x, _ in points)))
    return best if grown > FLAT * least else _flat(points)


def _flat(points: Sequence[tuple[float, float]]) -> PowerLaw:
    return PowerLaw(math.exp(sum(math.log(y) for _, y in points) / len(points)), 0.0, 0.0)


def _of_exponent(points: Sequence[tuple[float, float]], exponent: float) -> PowerLaw:
    """Constant and factor, neither below 0, that fit best: linear regression, weighted by 1/y²."""
    rows = [(1 / y, x**exponent / y) for x, y in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    constant = (a * bb - b * ab) / determinant if determinant > 0 else a / aa
    factor = (b * aa - a * ab) / determinant if determinant > 0 else 0.0
    if constant < 0:
        return PowerLaw(0.0, b / bb, exponent)
    return PowerLaw(constant, factor, exponent) if factor >= 0 else PowerLaw(a / aa, 0.0, exponent)


def _error(points: Sequence[tuple[float, float]], law: PowerLaw) -> float:
    return sum((law.at(x) / y - 1) ** 2 for x, y in points)
