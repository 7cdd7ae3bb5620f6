"""Measures the iterations and saves of a job while it trains and saves, alike on all ranks."""

from collections import defaultdict, deque
from dataclasses import asdict
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from fastckpt._core.client.collective import Agreement
from fastckpt._core.policy.frequency import profiling
from fastckpt._core.policy.frequency.intervals import SHORTEST
from fastckpt._core.policy.frequency.overhead import Iteration
from fastckpt._core.policy.frequency.profiling import COPIES, Profile
from fastckpt._core.policy.frequency.provisional_intervals import (
    MEMORY,
    provisional,
    steps_within,
)
from fastckpt._core.policy.frequency.tuning import Terms
from fastckpt._core.schedule.delayed_gather import DelayedGather
from fastckpt._core.schedule.stopwatch import Stopwatch

NOTICE = 2
"""Steps from the time that ranks send measurements until they act on them: none waits for the slowest to send."""


LATEST = 200
"""Iterations of each kind that are remembered."""


class Due(NamedTuple):
    """The saves that are due at the end of a step."""

    snapshot: bool
    persist: bool


class Profiler:
    """Measures iterations with and without saves in turn, while saves keep the job safe.

    The first step is persisted. Ranks exchange measurements after the second, then at turns that are farther and
    farther apart, and save at `provisional` intervals. A persist that failed is repeated.

    Args:
        ranks: The agreement to use.
        watch: The stopwatch.
        terms: The constraints.
        turns: The turns to profile, at most.
        before: The profile of earlier runs, alike on all ranks.

    Attributes:
        progress: The profile so far, alike on all ranks.
        saved: The last turn that was to end with a save.
    """

    def __init__(
        self,
        ranks: Agreement,
        watch: Stopwatch,
        terms: Terms,
        *,
        turns: range,
        before: Profile | None = None,
    ) -> None:
        self._gather, self._watch, self._terms = DelayedGather(ranks), watch, terms
        self._most = len(turns)
        self.progress = self._before = before
        self._first = first = turns.start
        # After the second step: the first one compiles, allocates and faults in memory, and shows little.
        self._check = self._asked = first + 1
        self._each_until = first
        self.saved, self._persisted = first - 1, first - 1
        self._persists_from: int | None = first
        self._intervals = provisional(None, None, terms.overhead)
        self._seen: list[float] = []
        self._iterations = defaultdict[tuple[bool, bool], deque[Iteration]](partial(deque, maxlen=LATEST))

    def due(self, turn: int) -> Due:
        """The saves that are due at the end of this turn."""
        snapshot = turn - self.saved >= self._intervals.memory or turn < self._each_until
        persist = snapshot and self._persists_from is not None and turn >= self._persists_from
        if snapshot:
            self.saved = turn
        if persist:
            self._persisted, self._persists_from = turn, None
        return Due(snapshot, persist)

    def turn(self, turn: int, seen: Iteration | None) -> Profile | None:
        """The profile of all ranks, once it is complete; the same in all of them at the same turn."""
        if seen is not None:
            self._seen.append(seen.seconds)
            self._iterations[seen.snapshot, seen.persisting].append(seen)
        if not self._gather.pending and turn >= self._check:
            # The first time ranks wait for each other: the cost of saves must be known before more are made.
            self._asked, notice = turn, NOTICE if turn > self._first + 1 else 0
            self._gather.send(self._report(), turn + notice)
        if (answers := self._gather.poll(turn)) is not None:
            self._update(turn, answers)
        return self.progress if self.progress is not None and self.progress.complete(self._most) else None

    def _update(self, turn: int, answers: list[dict[str, Any]]) -> None:
        # 1. join the profiles of all ranks, and continue that of earlier runs   2. choose provisional intervals and the
        # turn of the next exchange   3. plan the next persist, once all are idle
        ranks = [Profile(**each["profile"]) if each["profile"] else None for each in answers]
        self.progress = profiling.continued(self._before, profiling.joined(ranks))
        turns = [each["turn"] for each in answers if each["turn"] is not None]
        if turns:
            # The slowest rank: steps end together, so the others wait for it anyway.
            pace = max(SHORTEST, *turns)
            self._intervals = provisional(pace, self.progress, self._terms.overhead, self._terms.every.fixed(pace))
            self._check = turn + self._distance(turn, pace)
            if self._left == 0 and self._lacking > 0:
                # Enough iterations, but too few snapshots, where saves
                # are rare: measure them now rather than wait for long.
                self._each_until = self._check = turn + self._lacking
        else:
            self._check = turn + 1
        self._plan_persist(turn, idle=all(each["idle"] for each in answers))

    def _distance(self, turn: int, pace: float) -> int:
        """Turns until ranks exchange measurements next.

        The distance grows, because an all-gather costs more the more ranks there are. As long as iterations are
        profiled, it is short enough to notice that they take longer than before.
        """
        growing = max(1, (turn - self._first) // 2)
        return min(growing, self._left, steps_within(MEMORY, pace)) if self._left else growing

    @property
    def _left(self) -> int:
        """Iterations that are still to be profiled."""
        return max(0, self.progress.needed(self._most) - self.progress.iterations) if self.progress else self._most

    @property
    def _lacking(self) -> int:
        """Snapshots that are still to be profiled, in steps that follow each other where they were rare so far."""
        return COPIES - (self.progress.snapshots if self.progress else 0)

    def _plan_persist(self, turn: int, *, idle: bool) -> None:
        """Plan the next persist; reports from before the last one began do not count."""
        if idle and self._persisted < self._asked:
            known = self.progress is not None and self.progress.persists > 0
            self._persists_from = self._persisted + self._intervals.storage if known else turn

    def _report(self) -> dict[str, Any]:
        seen, self._seen = self._seen, []
        iterations, busy = [*chain(*self._iterations.values())], self._watch.processor.none_idle()
        profile = profiling.profiled(iterations, self._watch.durations, busy=busy)
        return {
            "turn": fmean(seen) if seen else None,
            "profile": asdict(profile) if profile else None,
            "idle": self._watch.idle,
        }
