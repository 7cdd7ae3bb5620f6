"""Reports each decision on the intervals of saves once, with its reason, from rank 0 to its agent."""

import time
from math import isfinite

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.ipc.messages import Decided
from fastckpt._core.policy.frequency.tuning import Decision

PAUSE, RARELY = 1.0, 0.01
"""Seconds, and part of its age, for which a job does not report unchanged intervals again: logs stay small."""


class DecisionLog:
    """Reports decisions to the saver; never waits for an answer, and raises nothing if the saver is gone.

    Args:
        link: Rank 0 alone reports, so that the logs of several nodes together have each decision once.
        bound: The part of training time that checkpoints may cost; None if the intervals do not depend on it.
    """

    def __init__(self, link: SaverClient, bound: float | None) -> None:
        self._link = link if link.place.rank == 0 else None
        self._bound = bound
        self._last: Decision | None = None
        self._begun = self._reported = time.monotonic()

    def profiling(self, step: int, why: str) -> None:
        """Report that the cost of checkpoints is measured from this step on: no intervals are in force."""
        if self._link is not None:
            self._link.report_decided(Decided(step, None, None, None, self._bound, False, why))

    def report(self, decision: Decision | None) -> None:
        """Report the last decision, unless it was reported; some of those that change nothing are left out."""
        if self._link is None or decision is None or decision is self._last:
            return
        first, self._last, now = self._last is None, decision, time.monotonic()
        # A pause of 1% of the job's age makes the number of lines grow with the logarithm of its length.
        if not decision.changed and now - self._reported < max(PAUSE, RARELY * (now - self._begun)):
            return
        self._reported = now
        intervals = decision.intervals
        # The first decision follows a profile: the cost of the intervals has not been measured yet.
        overhead = None if first or not isfinite(decision.overhead) else float(decision.overhead)
        self._link.report_decided(
            Decided(
                max(0, int(decision.step)),
                intervals.memory,
                intervals.storage,
                overhead,
                self._bound,
                decision.changed,
                decision.why,
            )
        )
