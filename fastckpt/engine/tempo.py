"""The frequency policy at work in one rank, alike in all: profile, agree, choose, and follow what is measured."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple, Protocol

from fastckpt import metrics
from fastckpt.engine.agreement import Agreement, Answers
from fastckpt.engine.stopwatch import Stopwatch
from fastckpt.policy import overhead, profiling
from fastckpt.policy.frequency import Intervals, Profile, choose
from fastckpt.policy.overhead import Iteration, Measurement
from fastckpt.policy.profile_cache import Remembered
from fastckpt.policy.tuning import Decision, State, Terms, started, tuned

NOTICE = 2
"""Steps from when ranks say what they measured until they act on it: nobody waits for the slowest to speak."""
COPIES = 3
"""Snapshots that a profile takes, in steps that follow each other."""


Sizes = Callable[[], tuple[int, int, int]]


class Due(NamedTuple):
    """What a step is to end with."""

    snapshot: bool
    persist: bool


class Tempo(Protocol):
    """Says when a checkpoint is due; equal on all ranks that are given equal steps."""

    def turn(self, step: int, seen: tuple[Iteration, float] | None) -> Due:
        """This step has ended, and this was measured of it: what is due now."""
        ...


class Steady:
    """Checkpoints every so many steps, counted from step 0."""

    def __init__(self, memory: int, storage: int) -> None:
        self._intervals = Intervals(memory, storage)

    def turn(self, step: int, seen: tuple[Iteration, float] | None) -> Due:
        """What is due now."""
        return Due(self._intervals.snapshots(step), self._intervals.persists(step))


class Adaptive:
    """Checkpoints as often as the overhead allows.

    Args:
        ranks: With whom to agree.
        terms: What to keep to.
        watch: Measures.
        profiler: How to find out what checkpoints cost, unless that is known.
        known: What an earlier run found out.

    Attributes:
        known: What is known by now.
    """

    def __init__(
        self, ranks: Agreement, terms: Terms, watch: Stopwatch, profiler: "Profiler", known: Remembered | None
    ) -> None:
        self.known = known
        self._ranks, self._watch = ranks, watch
        self._terms = replace(terms, notice=NOTICE)
        self._profiler = profiler
        self._state: State | None = None
        self._iterations: list[Iteration] = []
        self._answers: tuple[int, Answers] | None = None

    def turn(self, step: int, seen: tuple[Iteration, float] | None) -> Due:
        """What is due now."""
        if self.known is None:
            profile = self._profiler.turn(step, seen)
            if profile is None:
                return self._profiler.due(step)
            self._start(step, profile, None)
        elif self._state is None:
            self._start(step - 1, self.known.profile, self.known.intervals)
        else:
            self._follow(step, seen)
        intervals = self._now.intervals
        return Due(intervals.snapshots(step), intervals.persists(step))

    @property
    def _now(self) -> State:
        assert self._state is not None
        return self._state

    def _start(self, step: int, profile: Profile, intervals: Intervals | None) -> None:
        self._state, decision = started(profile, self._terms, step, intervals)
        self._decided(profile, decision)

    def _follow(self, step: int, seen: tuple[Iteration, float] | None) -> None:
        if seen is not None:
            self._iterations.append(seen[0])
        if self._answers is not None and step >= self._answers[0]:
            said = [Measurement.from_json(each) for each in self._answers[1]() if each is not None]
            self._answers = None
            if said:
                self._state, decision = tuned(self._now, said)
                self._decided(self._profile, decision)
            else:
                self._state = replace(self._now, ends=step + NOTICE)
        elif self._answers is None and step >= self._now.ends:
            self._answers = step + NOTICE, self._ranks.say(self._measured())

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
        self._tell(decision)

    def _tell(self, decision: Decision) -> None:
        intervals = decision.intervals
        metrics.event(
            "frequency", step=decision.step, memory=intervals.memory, storage=intervals.storage,
            overhead=decision.overhead, changed=decision.changed, why=decision.why,
        )  # fmt: skip


class Profiler:
    """Finds out what iterations and checkpoints take: some without any, then snapshots, the first of them persisted.

    Ranks see at steps that are farther and farther apart whether that persist has ended on all of them.

    Args:
        ranks: With whom to agree.
        watch: Measures.
        steps: Those to profile before the first checkpoint.
        sizes: Gives the bytes of the state, and the peak and capacity of device memory.
        overlaps: Whether snapshots are copied behind training; if not, an iteration has no room for them.
    """

    def __init__(self, ranks: Agreement, watch: Stopwatch, steps: range, sizes: Sizes, *, overlaps: bool) -> None:
        self._ranks, self._watch, self._sizes, self._overlaps = ranks, watch, sizes, overlaps
        self._copying = steps[-1]
        self._check = self._copying + COPIES + 1
        self._again = self._copying
        self._iterations: list[float] = []
        self._updates: list[float] = []
        self._answers: tuple[int, Answers] | None = None

    def due(self, step: int) -> Due:
        """What the profile needs now."""
        return Due(self._copying <= step < self._copying + COPIES or step == self._again, step == self._again)

    def turn(self, step: int, seen: tuple[Iteration, float] | None) -> Profile | None:
        """The profile of all ranks, once it is complete; the same in all of them at the same step."""
        if seen is not None:
            self._add(*seen)
        if self._answers is not None and step >= self._answers[0]:
            said, self._answers = self._answers[1](), None
            if all(each["profile"] for each in said):
                return profiling.joined([Profile(**each["profile"]) for each in said])
            if any(each["failed"] for each in said):
                self._again = step
        elif self._answers is None and step >= self._check:
            self._check = step + max(NOTICE + 1, step - self._copying)
            self._answers = step + NOTICE, self._ranks.say({"profile": self._profile(), "failed": self._watch.failed})
        return None

    def _add(self, iteration: Iteration, update: float) -> None:
        if not (iteration.snapshot or iteration.persisting):
            self._iterations.append(iteration.seconds)
            self._updates.append(update if self._overlaps else iteration.seconds)

    def _profile(self) -> dict[str, Any] | None:
        watch = self._watch
        blocks = tuple(watch.blocks) if self._overlaps else ()
        samples = profiling.Samples(
            self._iterations, self._updates, tuple(watch.copies), watch.durations, blocks=blocks
        )
        if not (samples.iterations and samples.host_copies and samples.persists):
            return None
        return asdict(profiling.profiled(samples, *self._sizes()))
