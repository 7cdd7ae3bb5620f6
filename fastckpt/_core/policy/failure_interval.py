"""The mean time between failures that an observation allows, with its exact confidence interval."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, fsum, isfinite, lgamma, log, sqrt

from fastckpt.errors import ConfigError

CONFIDENCE = 0.9
"""The confidence of the interval."""


@dataclass(frozen=True)
class FailureInterval:
    """Mean seconds between failures, as far as the observed ones show.

    Attributes:
        failures: The number observed.
        seconds: For how long.
        mean: Seconds for each failure; None if there was none.
        least: The lower bound of the mean time at `CONFIDENCE`: of both sides, or of one if there was no failure.
        most: The upper bound; None if there was no failure, and so no such bound.
    """

    failures: int
    seconds: float
    mean: float | None
    least: float
    most: float | None


def failure_interval(failures: int, seconds: float, confidence: float = CONFIDENCE) -> FailureInterval | None:
    """The exact interval for failures that come at random, of an observation that ended at a given time.

    The number of failures is Poisson distributed, and its mean has the bounds of F. Garwood (Biometrika 28, 1936); for
    the mean time between them these are those of B. Epstein and M. Sobel (JASA 48, 1953) by quantiles of chi-square.
    Without a failure there is a lower bound alone, with the whole error on its side: seconds / -ln(1 - confidence).

    Args:
        failures: Their number.
        seconds: The time for which the job was observed.
        confidence: That of the interval, within 0 and 1.

    Returns:
        None if nothing was observed.
    """
    if failures < 0 or not (isfinite(seconds) and seconds >= 0) or not 0 < confidence < 1:
        raise ConfigError(
            f"{failures} failures in {seconds} s at a confidence of {confidence}; give counts and times of 0 or more, "
            "and a confidence between 0 and 1"
        )
    if seconds == 0:
        return None
    error = 1 - confidence
    if failures == 0:
        return FailureInterval(0, seconds, None, seconds / -log(error), None)
    high = _mean_where(lambda mean: at_most(failures, mean) - error / 2, failures)
    low = _mean_where(lambda mean: at_most(failures - 1, mean) - (1 - error / 2), failures)
    return FailureInterval(failures, seconds, seconds / failures, seconds / high, seconds / low)


def at_most(count: int, mean: float) -> float:
    """The probability that a Poisson distributed number with this mean above 0 is at most ``count``."""
    return fsum(exp(k * log(mean) - mean - lgamma(k + 1)) for k in range(count + 1))


def _mean_where(excess: Callable[[float], float], count: int) -> float:
    """Return the mean at which a falling function of the mean is 0, by bisection."""
    # Ten deviations above the count, and 20 for small counts, are far beyond any confidence below 1 - 1e-9.
    low, high = 1e-12, count + 10 * sqrt(count) + 20
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2
