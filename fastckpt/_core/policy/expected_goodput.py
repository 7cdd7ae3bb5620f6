"""The share of a job's time that is of use, for failures that come at random."""

from dataclasses import dataclass
from math import exp, expm1, inf, isfinite

from fastckpt._core.policy.frequency.intervals import Costs, Intervals
from fastckpt.errors import ConfigError

_LARGEST = 700.0
"""Exponents above which exp overflows: nothing is of use then."""


@dataclass(frozen=True)
class ExpectedGoodput:
    """Shares of time that are of use.

    Attributes:
        memory: If failures leave memory as it is: a worker dies, or hangs.
        storage: If they take memory along: a node or its agent is lost, and no other node holds the save.
        without: If there are no failures: the cost of saves alone.
    """

    memory: float
    storage: float
    without: float


def expected_goodput(costs: Costs, intervals: Intervals, restart: float, mtbf: float) -> ExpectedGoodput:
    """The share of time in steps that are done for the first time, without the first start and the end of a job.

    Between two saves the time until they succeed is M exp(R/M) (exp((w + c)/M) - 1), for w seconds of work, c of saves,
    R of a restart and M between failures (J. T. Daly, FGCS 22(3), 2006, eq. 13; to first order J. W. Young, CACM 17(9),
    1974). Work from a persist's begin until it is durable may be lost, too: it is added to each restart.

    Args:
        costs: Of an iteration, a snapshot and a persist.
        intervals: Intervals in force.
        restart: Seconds from a failure to the end of the first step after it, without that step.
        mtbf: Mean seconds between failures, while the job is up or restarts.
    """
    if not (isfinite(restart) and restart >= 0 and isfinite(mtbf) and mtbf > 0):
        raise ConfigError(f"a restart takes {restart} s, and failures are {mtbf} s apart; give 0 or more, and above 0")
    snapshots = intervals.storage // intervals.memory
    work = costs.iteration * intervals.memory
    saves = costs.snapshot + costs.persist / snapshots
    return ExpectedGoodput(
        memory=_share(work, saves, restart, mtbf),
        storage=_share(snapshots * work, snapshots * saves, restart + costs.duration, mtbf),
        without=work / (work + saves),
    )


def _share(work: float, saves: float, restart: float, mtbf: float) -> float:
    exponents = (work + saves) / mtbf, restart / mtbf
    taken = inf if max(exponents) > _LARGEST else mtbf * exp(exponents[1]) * expm1(exponents[0])
    return work / taken
