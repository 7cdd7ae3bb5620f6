"""A clock of a worker's steps: divides their time among the rank's own work, by part, and waits for other ranks."""

import contextlib
import os
import time
from typing import Self

from fastckpt._core.memory.telemetry import PARTS, Line, StepWindow

STEPS = 20
"""Steps of a window."""
TRIMMED = 2
"""Steps of a window that are left out of its means: those with the most own time, such as one with an evaluation."""
DATA, FORWARD, BACKWARD, REST, WAIT = range(len(PARTS))
BETWEEN, AWAY = len(PARTS), len(PARTS) + 1
"""Time that is data if a forward follows, else the rest; and time that is no step's: saves, loads, evaluations."""


class StepClock:
    """Adds up the time of each step by part, and reports it on ``line``; one thread calls it at a time.

    Own time is time that is neither a wait nor away. In a step without a seen arrival at a collective, only the time of
    fetching data surely is own time.

    Attributes:
        part: Part of the step to which the time from now on belongs.
        in_backward: True if a backward has begun, and its end will be seen.
        fetches: True if the script has a loader of ours: then time is data only in it.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._sums = [0] * (AWAY + 1)
        self._since = time.monotonic_ns()
        self._window = list[tuple[int, list[int]]]()
        self._number = 0
        self._sees = False
        self.part = AWAY
        self.in_backward = self.fetches = False

    def enter(self, part: int) -> int:
        """Begin a part; returns the one that it ends."""
        now, before = time.monotonic_ns(), self.part
        self._sums[before] += now - self._since
        self._since, self.part = now, part
        return before

    def begin_forward(self, part: int = FORWARD) -> None:
        """Begin the forward, or the wait in which it begins: time before it was for data, unless a loader is seen."""
        self.enter(part)
        self._settle(REST if self.fetches else DATA)

    def arrive(self) -> None:
        """Begin the last wait of a backward."""
        self._sees = True
        self.enter(WAIT)

    def end_backward(self) -> None:
        """End a backward, and its wait."""
        self.in_backward = False
        self.enter(BETWEEN)

    def pause(self) -> None:
        """Begin time that is no part of a step; the next part ends it."""
        self.enter(AWAY)

    def go_on(self) -> None:
        """End the time that `pause` began, if no part has."""
        if self.part == AWAY:
            self.enter(BETWEEN)

    def step(self) -> None:
        """End a step."""
        self.enter(BETWEEN)
        self._settle(REST)
        self.in_backward = False
        sums = self._sums
        parts = sums[: len(PARTS)]
        self._line.spend(parts)
        own = parts[DATA] + (parts[FORWARD] + parts[BACKWARD] + parts[REST] if self._sees else 0)
        self._window.append((own, parts))
        self._sums, self._sees = [0] * len(sums), False
        if len(self._window) == STEPS:
            self._close_window()

    def _settle(self, part: int) -> None:
        sums = self._sums
        sums[part] += sums[BETWEEN]
        sums[BETWEEN] = 0

    def _close_window(self) -> None:
        self._number += 1
        kept = sorted(self._window, key=_own)[:-TRIMMED]
        self._window = []
        means = (sum(column) // len(kept) for column in zip(*(parts for _, parts in kept), strict=True))
        self._line.close_window(StepWindow(self._number, tuple(means), sum(map(_own, kept)) // len(kept)))


def _own(step: tuple[int, list[int]]) -> int:
    return step[0]


class _Running:
    """The clock of this process, if it has one: hooks on models find it here, so that these are copied without it."""

    clock: StepClock | None = None


running = _Running()


def _stop() -> None:
    running.clock = None


os.register_at_fork(after_in_child=_stop)


class _Fetching:
    """Time in which a loader fetches data."""

    def __init__(self) -> None:
        self._before = BETWEEN

    def __enter__(self) -> Self:
        clock = running.clock
        if clock is not None:
            clock.fetches = True
            self._before = clock.part if clock.part == AWAY else clock.enter(DATA)
        return self

    def __exit__(self, *_: object) -> None:
        clock = running.clock
        if clock is not None and clock.part == DATA:
            clock.enter(self._before)


def fetching() -> contextlib.AbstractContextManager[object]:
    """Time in which data are fetched, which an evaluation's are not."""
    return _Fetching()
