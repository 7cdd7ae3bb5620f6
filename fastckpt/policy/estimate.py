"""Means that know how far they may be from the truth."""

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from statistics import fmean, pvariance
from typing import NamedTuple, Self


class Estimate(NamedTuple):
    """The mean of what was measured.

    Attributes:
        samples: How many measurements.
        mean: Their mean; 0 if there are none.
        variance: That of one measurement.
    """

    samples: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean; infinite for one measurement, which may be an accident, larger for a few."""
        if self.samples < 2:
            return inf
        freedom = self.samples - 1
        return sqrt(self.variance / freedom) * (1 + 8 / freedom**2)

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The estimate from these measurements."""
        return cls(len(values), fmean(values), pvariance(values)) if values else cls()


NOTHING = Estimate()


def pool(estimates: Iterable[Estimate]) -> Estimate:
    """The estimate from all measurements together."""
    known = [each for each in estimates if each.samples]
    if not known:
        return NOTHING
    count = sum(each.samples for each in known)
    mean = sum(each.samples * each.mean for each in known) / count
    return Estimate(
        count, mean, sum(each.samples * (each.variance + (each.mean - mean) ** 2) for each in known) / count
    )


def difference(those: Estimate, others: Estimate) -> Estimate:
    """By how much those are larger than the others."""
    freedom = those.samples - 1
    variance = (those.error**2 + others.error**2) / (1 + 8 / freedom**2) ** 2 * freedom if freedom else 0.0
    return Estimate(those.samples, those.mean - others.mean, variance)
