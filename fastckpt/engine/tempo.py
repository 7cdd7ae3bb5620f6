"""The frequency policy at work in one rank, alike in all: profile, agree, choose, and follow what is measured."""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from math import nan
from statistics import median
from typing import Any, NamedTuple, Protocol

from fastckpt.engine.agreement import Agreement, Answers
from fastckpt.engine.single import Single
from fastckpt.engine.stopwatch import Stopwatch
from fastckpt.format.ids import SaveId
from fastckpt.policy import overhead, profiling
from fastckpt.policy.frequency import Intervals, Profile, choose
from fastckpt.policy.overhead import Iteration, Measurement
from fastckpt.policy.profile_cache import Remembered
from fastckpt.policy.tuning import Decision, State, Terms, started, tuned

NOTICE = 2
"""Steps from when ranks say what they measured until they act on it: nobody waits for the slowest to speak."""
COPIES = 3
"""Snapshots that a profile takes, in steps that follow each other."""
EARLY, PATIENCE = 4, 60.0
"""After so many iterations it is seen how many fit into so many seconds: no more than those are profiled."""
LATEST = 200
"""Iterations that are remembered."""
GIVEN = "the user gave these intervals"


Sizes = Callable[[], tuple[int, int, int]]


class Due(NamedTuple):
    """What a step is to end with."""

    snapshot: bool
    persist: bool


class Tempo(Protocol):
    """Says when a checkpoint is due; equal on all ranks that are given equal steps.

    Attributes:
        decision: The last one; None as long as it profiles.
    """

    decision: Decision | None

    def turn(self, step: int) -> Due:
        """This step has ended: what is due now."""
        ...

    def saved(self, save: SaveId | None, *, persist: bool, pending: bool) -> None:
        """A snapshot was taken since the last turn, and is to be persisted; None if it was skipped."""
        ...

    def close(self) -> None:
        """Measure no more."""
        ...


class Steady:
    """Checkpoints every so many steps, counted from step 0; training goes on from ``step``.

    One that is due at a step that is left out is made at the next.
    """

    def __init__(self, memory: int, storage: int, step: int) -> None:
        self._intervals, self._last = Intervals(memory, storage), step
        self.decision: Decision | None = Decision(step, self._intervals, nan, True, GIVEN)

    def turn(self, step: int) -> Due:
        """What is due now."""
        last, self._last = self._last, step
        memory, storage = self._intervals.memory, self._intervals.storage
        return Due(step // memory > last // memory, step // storage > last // storage)

    def saved(self, save: SaveId | None, *, persist: bool, pending: bool) -> None:
        """Nothing is measured."""

    def close(self) -> None:
        """Nothing was measured."""


class Adaptive:
    """Checkpoints as often as the overhead allows.

    It counts turns: steps that a training leaves out, or counts in others than ones, do not matter.

    Args:
        ranks: With whom to agree.
        terms: What to keep to.
        watch: Measures.
        profiler: How to find out what checkpoints cost, unless that is known.
        known: What an earlier run found out.
        turns: How many there were before.

    Attributes:
        known: What is known by now.
        decision: The last one; None as long as it profiles.
    """

    def __init__(
        self,
        ranks: Agreement,
        terms: Terms,
        watch: Stopwatch,
        profiler: "Profiler",
        known: Remembered | None,
        turns: int,
    ) -> None:
        self.known = known
        self.decision: Decision | None = None
        self._ranks, self._watch, self._turns, self._step = ranks, watch, turns, turns
        self._terms = replace(terms, notice=NOTICE)
        self._profiler = profiler
        self._single = Single(ranks.beside("persists"), watch, NOTICE)
        self._state: State | None = None
        self._iterations: list[Iteration] = []
        self._answers: tuple[int, Answers] | None = None

    def turn(self, step: int) -> Due:
        """What is due now."""
        seen = self._watch.turn()
        self._turns, self._step = self._turns + 1, step
        turn = self._turns
        if self.known is None:
            profile = self._profiler.turn(turn, seen)
            if profile is None:
                return self._profiler.due(turn)
            self._start(turn, profile, None)
        elif self._state is None:
            self._start(turn - 1, self.known.profile, self.known.intervals)
        else:
            self._follow(turn, seen)
        intervals = self._now.intervals
        return Due(intervals.snapshots(turn), self._single.begins(turn, intervals))

    def saved(self, save: SaveId | None, *, persist: bool, pending: bool) -> None:
        """A snapshot was taken since the last turn, and is to be persisted; None if it was skipped."""
        self._watch.saved(save, persist=persist, pending=pending)

    def close(self) -> None:
        """Measure no more."""
        self._watch.close()

    @property
    def _now(self) -> State:
        assert self._state is not None
        return self._state

    def _start(self, turn: int, profile: Profile, intervals: Intervals | None) -> None:
        self._state, decision = started(profile, self._terms, turn, intervals)
        self._decided(profile, decision)

    def _follow(self, turn: int, seen: tuple[Iteration, float] | None) -> None:
        if seen is not None:
            self._iterations.append(seen[0])
        if self._answers is not None and turn >= self._answers[0]:
            said = [Measurement.from_json(each) for each in self._answers[1]() if each is not None]
            self._answers = None
            if said:
                self._state, decision = tuned(self._now, said)
                self._decided(self._profile, decision)
            else:
                self._state = replace(self._now, ends=turn + NOTICE)
        elif self._answers is None and turn >= self._now.ends:
            self._answers = turn + NOTICE, self._ranks.say(self._measured())

    def _measured(self) -> dict[str, Any] | None:
        """What this rank has seen since it was asked last; None if nothing."""
        iterations, self._iterations = self._iterations, []
        durations, self._watch.durations = self._watch.durations, []
        overruns, self._watch.overruns = self._watch.overruns, 0
        return overhead.measured(iterations, durations, overruns).to_json() if iterations else None

    @property
    def _profile(self) -> Profile:
        assert self.known is not None
        return self.known.profile

    def _decided(self, profile: Profile, decision: Decision) -> None:
        self.known = Remembered(profile, choose(profile, self._terms.overhead), decision.intervals)
        if decision.changed:
            self._iterations = []
        self.decision = replace(decision, step=self._step)


class Profiler:
    """Finds out what iterations and checkpoints take: some without any, then snapshots, the first of them persisted.

    Ranks see at turns that are farther and farther apart whether that persist has ended on all of them. As long as it
    has not, snapshots are as frequent as they may be if persists cost nothing; if it failed, the next is persisted.

    Args:
        ranks: With whom to agree.
        watch: Measures.
        turns: Those to profile before the first checkpoint, at most.
        sizes: Gives the bytes of the state, and the peak and capacity of device memory.
        overhead: The part of training time that checkpoints may cost.
        overlaps: Whether snapshots are copied behind training; if not, an iteration has no room for them.
    """

    def __init__(
        self, ranks: Agreement, watch: Stopwatch, turns: range, sizes: Sizes, *, overhead: float, overlaps: bool
    ) -> None:
        self._ranks, self._watch, self._sizes = ranks, watch, sizes
        self._overhead, self._overlaps = overhead, overlaps
        self._turns = turns
        self._copying: int | None = None
        self._check = turns.start + EARLY
        self._again = self._interval = 0
        self._iterations: deque[float] = deque(maxlen=LATEST)
        self._updates: deque[float] = deque(maxlen=LATEST)
        self._slowed: deque[float] = deque(maxlen=LATEST)
        self._answers: tuple[int, Answers] | None = None

    def due(self, turn: int) -> Due:
        """What the profile needs now."""
        if self._copying is None or turn < self._copying:
            return Due(False, False)
        since = turn - self._copying
        meanwhile = self._interval > 0 and since % self._interval == 0
        return Due(since < COPIES or meanwhile or turn == self._again, turn == self._again)

    def turn(self, turn: int, seen: tuple[Iteration, float] | None) -> Profile | None:
        """The profile of all ranks, once it is complete; the same in all of them at the same turn."""
        if seen is not None:
            self._add(*seen)
        if self._answers is not None and turn >= self._answers[0]:
            said, self._answers = self._answers[1](), None
            return self._heard(turn, said)
        if self._answers is None and turn >= self._check:
            self._answers = turn + NOTICE, self._ranks.say(self._said())
        return None

    def _heard(self, turn: int, said: list[dict[str, Any]]) -> Profile | None:
        if self._copying is None:
            slowest, most = max(each["iteration"] for each in said), len(self._turns)
            iterations = most if slowest * most <= PATIENCE else int(PATIENCE / slowest)
            self._again = self._copying = max(turn, self._turns.start - 1 + iterations)
            self._check = self._copying + COPIES + 1
            return None
        profiles = [Profile(**each["profile"]) for each in said if each["profile"]]
        profile = profiling.joined(profiles) if len(profiles) == len(said) else None
        if profile and all(each["complete"] for each in said):
            return profile
        if profile:
            self._interval = choose(profile, self._overhead).interval
        if any(each["idle"] and not each["complete"] for each in said):
            self._again = turn
        self._check = turn + max(1, turn - NOTICE - self._copying)
        return None

    def _add(self, iteration: Iteration, update: float) -> None:
        if not (iteration.snapshot or iteration.persisting):
            self._iterations.append(iteration.seconds)
            self._updates.append(update if self._overlaps else iteration.seconds)
        elif not iteration.snapshot:
            self._slowed.append(iteration.seconds)

    def _said(self) -> dict[str, Any]:
        iteration = median(self._iterations) if self._iterations else PATIENCE
        complete = bool(self._watch.durations)
        return {"iteration": iteration, "profile": self._profile(), "complete": complete, "idle": self._watch.idle}

    def _profile(self) -> dict[str, Any] | None:
        """What is known; a persist of which that is not known takes no time."""
        watch = self._watch
        blocks = tuple(watch.blocks) if self._overlaps else ()
        samples = profiling.Samples(
            tuple(self._iterations), tuple(self._updates), tuple(watch.copies), watch.durations or [0.0],
            tuple(watch.asides), blocks=blocks, slowed=tuple(self._slowed),
        )  # fmt: skip
        if not (samples.iterations and samples.host_copies):
            return None
        return asdict(profiling.profiled(samples, *self._sizes()))
