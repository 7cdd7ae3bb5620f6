"""Measures what iterations and saves of a job take while it trains and saves, alike on all ranks."""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from typing import Any, NamedTuple

from fastckpt.engine.agreement import Agreement, Answers
from fastckpt.engine.stopwatch import Stopwatch
from fastckpt.policy import profiling
from fastckpt.policy.frequency import Profile, choose
from fastckpt.policy.overhead import FEW, Iteration
from fastckpt.policy.profiling import Progress
from fastckpt.policy.provisional_intervals import MEMORY, Pace, provisional, steps_within
from fastckpt.policy.tuning import Terms

NOTICE = 2
"""Steps from when ranks send what they measured until they act on it: nobody waits for the slowest to send it."""
LATEST = 200
"""Iterations that are remembered."""

Sizes = Callable[[], tuple[int, int, int]]


class Due(NamedTuple):
    """What a step is to end with."""

    snapshot: bool
    persist: bool


class Profiler:
    """Measures what iterations and checkpoints take, with and without saves by turns, while training is kept safe.

    The first step is persisted. Ranks send each other what they measured at turns that are farther and farther apart;
    until the first time each step is saved, then as `provisional` says. A persist that failed is repeated.

    Args:
        ranks: With whom to agree.
        watch: Measures.
        terms: What to keep to.
        sizes: Gives the bytes of the state, and the peak and capacity of device memory.
        turns: Those to profile, at most.
        overlaps: Whether snapshots are copied behind training; if not, an iteration has no room for them.
        before: What earlier runs have measured, alike on all ranks.

    Attributes:
        progress: What is known by now, alike on all ranks.
        saved: The last turn that was to end with a save.
    """

    def __init__(
        self,
        ranks: Agreement,
        watch: Stopwatch,
        terms: Terms,
        sizes: Sizes,
        *,
        turns: range,
        overlaps: bool,
        before: Progress | None = None,
    ) -> None:
        self._ranks, self._watch, self._terms, self._sizes = ranks, watch, terms, sizes
        self._most, self._overlaps = len(turns), overlaps
        self.progress = self._before = before
        self._first = first = turns.start
        self._check = first + 1
        self.saved, self._persisted = first - 1, first - 1
        self._persists_from: int | None = first
        self._intervals = provisional(None, terms.overhead)
        self._seen: list[float] = []
        self._plain: deque[float] = deque(maxlen=LATEST)
        self._updates: deque[float] = deque(maxlen=LATEST)
        self._slowed: deque[float] = deque(maxlen=LATEST)
        self._copied: deque[float] = deque(maxlen=LATEST)
        self._counted = 0
        self._answers: tuple[int, Answers] | None = None

    def due(self, turn: int) -> Due:
        """What this turn is to end with."""
        snapshot = turn - self.saved >= self._intervals.memory
        persist = snapshot and self._persists_from is not None and turn >= self._persists_from
        if snapshot:
            self.saved = turn
        if persist:
            self._persisted, self._persists_from = turn, None
        return Due(snapshot, persist)

    def turn(self, turn: int, seen: tuple[Iteration, float] | None) -> Profile | None:
        """The profile of all ranks, once it is complete; the same in all of them at the same turn."""
        if seen is not None:
            self._add(*seen)
        if self._answers is not None and turn >= self._answers[0]:
            said, self._answers = self._answers[1](), None
            self._heard(turn, said)
        elif self._answers is None and turn >= self._check:
            self._answers = turn + NOTICE, self._ranks.say(self._said())
        complete = self.progress is not None and self.progress.complete(self._most)
        return self.progress.profile if self.progress is not None and complete else None

    def _heard(self, turn: int, said: list[dict[str, Any]]) -> None:
        since = profiling.agreed([_progress(each["progress"]) for each in said])
        self.progress = profiling.continued(self._before, since)
        turns = [each["turn"] for each in said if each["turn"] is not None]
        distance = max(1, (turn - self._first) // 2)
        if turns:
            pace = self._pace(max(turns))
            self._intervals = provisional(pace, self._terms.overhead, self._terms.every.fixed(pace.turn))
            distance = min(distance, steps_within(MEMORY, pace.turn))
        if self.progress is not None:
            left = self.progress.needed(self._most) - self.progress.iterations
            distance = min(distance, left) if left > 0 else distance
            self._plan_persist(turn, idle=all(each["idle"] for each in said))
        self._check = turn + distance

    def _plan_persist(self, turn: int, *, idle: bool) -> None:
        """Say when the next persist may begin; what ranks said before the last one began says nothing of it."""
        if idle and self._persisted < turn - NOTICE:
            known = self.progress is not None and self.progress.persists > 0
            self._persists_from = self._persisted + self._intervals.storage if known else turn

    def _pace(self, turn: float) -> Pace:
        if self.progress is None:
            return Pace(turn)
        stall = choose(self.progress.profile, self._terms.overhead).stall + self.progress.profile.copy_slowdown
        return Pace(turn, stall, self.progress.profile.storage)

    def _add(self, iteration: Iteration, update: float) -> None:
        self._seen.append(iteration.seconds)
        self._counted += not iteration.persisting
        if iteration.snapshot and not iteration.persisting:
            self._copied.append(iteration.work)
        elif not iteration.snapshot:
            (self._slowed if iteration.persisting else self._plain).append(iteration.seconds)
        self._updates.append(update if self._overlaps else iteration.seconds)

    def _said(self) -> dict[str, Any]:
        seen, self._seen = self._seen, []
        progress = self._measured()
        return {
            "turn": fmean(seen) if seen else None,
            "progress": asdict(progress) if progress else None,
            "idle": self._watch.idle,
        }

    def _measured(self) -> Progress | None:
        """What this run has measured; a persist of which that is not known takes no time.

        Where no iteration is without a save or a persist, others stand for it.
        """
        watch = self._watch
        plain = self._plain if len(self._plain) >= FEW else self._copied or self._plain or self._slowed
        if not (plain and watch.copies):
            return None
        samples = profiling.Samples(
            iterations=tuple(plain),
            updates=tuple(self._updates),
            host_copies=tuple(watch.copies),
            persists=watch.durations or [0.0],
            device_copies=tuple(watch.asides),
            blocks=tuple(watch.blocks) if self._overlaps else (),
            slowed=tuple(self._slowed),
            copied=tuple(self._copied),
        )
        profile = profiling.profiled(samples, *self._sizes())
        return Progress(profile, self._counted, len(watch.copies), len(watch.durations))


def _progress(said: dict[str, Any] | None) -> Progress | None:
    return Progress(**{**said, "profile": Profile(**said["profile"])}) if said else None
