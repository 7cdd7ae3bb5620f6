"""Means of measurements, with their standard errors."""

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from statistics import fmean, pvariance
from typing import NamedTuple, Self

BATCHES = 8
"""Parts of a window whose means are compared for its variance."""


class Estimate(NamedTuple):
    """The mean of some measurements.

    Attributes:
        samples: Their number.
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
        # the second factor widens the error of few samples, as Student's t does
        return sqrt(self.variance / freedom) * (1 + 8 / freedom**2)

    def above(self, errors: float) -> float:
        """The mean and so many standard errors; nothing measured is 0."""
        return self.mean + errors * self.error if errors and self.samples else self.mean

    def times(self, factor: float) -> Self:
        """The estimate of so many times the same."""
        return self._replace(mean=factor * self.mean, variance=factor**2 * self.variance)

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The estimate from these measurements, in the order in which they were made.

        Neighbouring measurements may be correlated: the variance is that of batch means, if it is larger (R. W. Conway,
        Management Science 10(1), 1963).
        """
        if not values:
            return cls()
        size = len(values) // BATCHES
        # Means of long batches are nearly independent even where neighbouring iterations are not.
        batches = [fmean(values[i * size : (i + 1) * size]) for i in range(BATCHES)] if size > 1 else [0.0]
        return cls(len(values), fmean(values), max(pvariance(values), size * pvariance(batches)))


NOTHING = Estimate()


def pool(estimates: Iterable[Estimate]) -> Estimate:
    """The estimate from all measurements together; the variance is that of their means, if it is larger."""
    known = [each for each in estimates if each.samples]
    if not known:
        return NOTHING
    count = sum(each.samples for each in known)
    mean = sum(each.samples * each.mean for each in known) / count
    within = sum(each.samples * each.variance for each in known) / count
    between = sum(each.samples * (each.mean - mean) ** 2 for each in known) / max(1, len(known) - 1)
    return Estimate(count, mean, max(within, between))


def difference(those: Estimate, others: Estimate, each: float = 1.0) -> Estimate:
    """The difference of two means, with its error; each of those values is as long as so many of the others.

    A few values may be close together by chance, so both are taken to vary like those that vary more.
    """
    variance = max(those.variance / each, others.variance)
    error = variance * (each / those.samples + each**2 / others.samples)
    return Estimate(those.samples, those.mean - each * others.mean, error * (those.samples - 1))
