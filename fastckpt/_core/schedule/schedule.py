"""Schedules of saves, alike on all ranks: profile, agree, choose, and follow the measurements."""

from dataclasses import replace
from math import nan
from typing import Any, Protocol

from fastckpt._core.client.collective import Agreement
from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.frequency import overhead
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.overhead import Iteration, Measurement
from fastckpt._core.policy.frequency.profile_cache import Remembered
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.policy.frequency.tuning import Decision, Terms, TuningState, started, tuned
from fastckpt._core.schedule.delayed_gather import DelayedGather
from fastckpt._core.schedule.persist_gate import PersistGate
from fastckpt._core.schedule.profiler import NOTICE, Due, Profiler
from fastckpt._core.schedule.stopwatch import Stopwatch

GIVEN = "the user gave these intervals"


class Schedule(Protocol):
    """Decides when a checkpoint is due; equal on all ranks that are given equal steps.

    Attributes:
        decision: The last one; None as long as it profiles.
    """

    decision: Decision | None

    def turn(self, step: int) -> Due:
        """Note that a step has ended; returns the saves that are due."""
        ...

    def saved(self, save: SaveId | None, *, persist: bool) -> None:
        """A snapshot was taken since the last turn, and is to be persisted; None if it was skipped."""
        ...


class FixedSchedule:
    """Checkpoints every so many steps, counted from step 0; training goes on from ``step``.

    One that is due at a step that is left out is made at the next.
    """

    def __init__(self, memory: int, storage: int, step: int) -> None:
        self._intervals, self._last = Intervals(memory, storage), step
        self.decision: Decision | None = Decision(step, self._intervals, nan, True, GIVEN)

    def turn(self, step: int) -> Due:
        """The saves that are due now."""
        last, self._last = self._last, step
        memory, storage = self._intervals.memory, self._intervals.storage
        # By quotients, not by remainders: a step that the loop leaves out must not lose its save.
        return Due(step // memory > last // memory, step // storage > last // storage)

    def saved(self, save: SaveId | None, *, persist: bool) -> None:
        """Do nothing: fixed intervals need no measurement."""


class AdaptiveSchedule:
    """Checkpoints as often as the overhead allows.

    It counts turns: steps that a job leaves out, or numbers otherwise, do not matter.

    Args:
        ranks: The agreement to use.
        terms: The constraints.
        watch: The stopwatch.
        profiler: Measures the cost of checkpoints, unless it is known.
        known: The results of an earlier run.
        turns: The number of turns before.

    Attributes:
        known: The results so far.
        decision: The last one; None as long as it profiles.
    """

    def __init__(
        self,
        ranks: Agreement,
        terms: Terms,
        watch: Stopwatch,
        profiler: Profiler,
        known: Remembered | None,
        turns: int,
    ) -> None:
        self.known = known
        self.decision: Decision | None = None
        self._gather, self._watch, self._turns, self._step = DelayedGather(ranks), watch, turns, turns
        # Decisions take effect NOTICE turns after the window, when every rank has read the values of all.
        self._terms = replace(terms, notice=NOTICE)
        self._profiler = profiler
        # An agreement of its own: the gate's values and the measurements may be on their way at the same time.
        self._gate = PersistGate(ranks.sibling("persists"), watch, NOTICE)
        self._state: TuningState | None = None
        self._iterations: list[Iteration] = []

    def turn(self, step: int) -> Due:
        """The saves that are due now."""
        # 1. measure the iteration that has ended   2. without known costs: profile, until the profile is complete
        # 3. else follow the measurements   4. the saves due by the intervals in force; the gate may put a persist off
        seen = self._watch.turn()
        self._turns, self._step = self._turns + 1, step
        turn = self._turns
        if self.known is None:
            profile = self._profiler.turn(turn, seen)
            if profile is None:
                return self._profiler.due(turn)
            self._start(turn, profile, None, self._profiler.saved)
        elif self._state is None:
            # The first turn after a resume: intervals count from the step that was resumed.
            self._start(turn - 1, self.known.profile, self.known.intervals, turn - 1)
        else:
            self._follow(turn, seen)
        intervals = self._now.intervals
        return Due(intervals.snapshots(turn), self._gate.begins(turn, intervals))

    def saved(self, save: SaveId | None, *, persist: bool) -> None:
        """A snapshot was taken since the last turn, and is to be persisted; None if it was skipped."""
        self._watch.saved(save, persist=persist)

    @property
    def progress(self) -> Profile | None:
        """The profile so far, alike on all ranks."""
        return self._profiler.progress

    @property
    def _now(self) -> TuningState:
        assert self._state is not None
        return self._state

    def _start(self, turn: int, profile: Profile, intervals: Intervals | None, saved: int) -> None:
        """Choose intervals, counted from the last turn that was saved."""
        state, decision = started(profile, self._terms, turn, intervals)
        # The profile's last save counts as the first one, so that the next keeps its distance.
        self._state = replace(state, intervals=replace(state.intervals, anchor=saved))
        self._decided(profile, decision)

    def _follow(self, turn: int, seen: Iteration | None) -> None:
        if seen is not None:
            self._iterations.append(seen)
        if (answers := self._gather.poll(turn)) is not None:
            measurements = [Measurement.from_json(each) for each in answers if each is not None]
            if measurements:
                self._state, decision = tuned(self._now, measurements)
                self._decided(self._profile, decision)
            else:
                # No rank could measure an iteration, such as right after a resume: measure for a little longer.
                self._state = replace(self._now, ends=turn + NOTICE)
        elif not self._gather.pending and turn >= self._now.ends:
            self._gather.send(self._measured(), turn + NOTICE)

    def _measured(self) -> dict[str, Any] | None:
        """The measurements of this rank since the last call; None if there are none."""
        iterations, self._iterations = self._iterations, []
        durations, self._watch.durations = self._watch.durations, []
        overruns, self._watch.overruns = self._watch.overruns, 0
        busy = self._watch.processor.none_idle()
        return overhead.measured(iterations, durations, overruns, busy=busy).to_json() if iterations else None

    @property
    def _profile(self) -> Profile:
        assert self.known is not None
        return self.known.profile

    def _decided(self, profile: Profile, decision: Decision) -> None:
        self.known = Remembered(profile, decision.intervals)
        # Iterations under the old intervals prove nothing about the new ones.
        if decision.changed:
            self._iterations = []
        self.decision = replace(decision, step=self._step)
