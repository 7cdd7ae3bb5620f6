"""Durations of steps and starts of a job, and for how long each rank has waited for others."""

import math
from collections.abc import Mapping

from fastckpt._core.memory.telemetry import Telemetry

_RECENT = 600.0
"""Seconds after which a slow step counts half."""
_FIRST_STEPS = 10
"""Steps that compile and allocate, among others: the mean of no more than these is no measure."""

Lines = Mapping[int, Telemetry]
"""The last telemetry of each local rank."""


class StepTimes:
    """Durations of steps and starts: the slowest of the recent ones.

    Attributes:
        start: Seconds from the slowest start of workers to their first step, or how far towards it they have come.
    """

    def __init__(self) -> None:
        self.start = self._slowest = self._when = 0.0
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """New processes, started ``now``, count their steps from the start; their first ones are not representative."""
        self._began = now
        self._last: dict[int, Telemetry] = {}

    def see(self, lines: Lines) -> None:
        """Update from the telemetry of workers."""
        for rank, line in lines.items():
            self.start = max(self.start, (line.first or line.beat) / 1e9 - self._began)
            if line.phase:
                self._last.pop(rank, None)  # the time that it takes is no step's
                continue
            last = self._last.get(rank, line)
            if line.steps != last.steps or rank not in self._last:
                self._last[rank] = line
            if not self._slowest and line.steps > _FIRST_STEPS:
                # Many steps may have passed before the first look, and none may come after it.
                self._slowest, self._when = line.stepping / (line.steps - 1) / 1e9, line.beat / 1e9
            # Not from 0: the first step compiles and allocates.
            if line.steps > last.steps > 0:
                now = line.beat / 1e9
                took = (line.beat - last.beat) / (line.steps - last.steps) / 1e9
                # The old maximum decays: one very slow step must not
                # allow silence of that length for the rest of the job.
                self._slowest, self._when = max(took, self.slowest(now)), now

    def slowest(self, now: float) -> float:
        """Seconds of the slowest step, half of it for each ten minutes that it is past."""
        return self._slowest * math.exp2(-max(0.0, now - self._when) / _RECENT)


class Waits:
    """A clock that runs while ranks may wait for others, and its time when each last reported."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._shown: dict[int, tuple[int, float]] = {}

    def begin(self) -> None:
        """Start counting again."""
        self._shown.clear()

    def advance(self, seconds: float) -> None:
        """Add time in which all ranks may have waited."""
        self._clock += seconds

    def of(self, rank: int, beat: int) -> float:
        """Return the seconds for which a rank may have waited since it reported at ``beat``."""
        if self._shown.get(rank, (-1, 0.0))[0] != beat:
            self._shown[rank] = (beat, self._clock)
        return self._clock - self._shown[rank][1]
