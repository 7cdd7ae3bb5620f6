"""The optimal distance of checkpoints for known failures, after Daly."""

from math import isfinite, sqrt
from statistics import NormalDist

from fastckpt.errors import ConfigError

CONFIDENCE = 0.8
"""Confidence that failures are not more frequent than they are taken to be."""


def daly(cost: float, mtbf: float) -> float:
    """Seconds of training between checkpoints, to higher order (J. T. Daly, FGCS 22(3), 2006).

    The time to restart does not move the optimum. For a checkpoint that costs more than twice the mean time between
    failures the series does not hold: the interval is that time.

    Args:
        cost: Seconds that a checkpoint costs training. Time in the background does not count: it delays each
            checkpoint alike.
        mtbf: Mean seconds between failures.
    """
    if not (isfinite(cost) and cost >= 0 and isfinite(mtbf) and mtbf > 0):
        raise ConfigError(
            f"a checkpoint costs {cost} s, and failures are {mtbf} s apart; give a cost of 0 or more and a time above 0"
        )
    ratio = cost / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return sqrt(2 * cost * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost


def mean_time_between(failures: int, seconds: float) -> float | None:
    """A cautious mean time between failures, from those observed; None if there were none.

    It is the lower bound at `CONFIDENCE` for failures that come at random: if they came as often as that, so few would
    be seen once in five times. After one failure it is a third of the time observed, after 100 nine tenths of their
    average. Too short an estimate costs overhead, which is bounded; too long a one costs work. The quantile of
    the Poisson distribution is taken from chi-square's by Wilson and Hilferty (1931); it is within 1%.

    Args:
        failures: Their number.
        seconds: The time for which the job was observed.
    """
    if failures < 0 or not (isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"{failures} failures in {seconds} s; give counts and times of 0 or more")
    if failures == 0 or seconds == 0:
        return None
    many = failures + 1
    most = many * (1 - 1 / (9 * many) + NormalDist().inv_cdf(CONFIDENCE) / (3 * sqrt(many))) ** 3
    return seconds / most
