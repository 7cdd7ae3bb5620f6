"""Intervals that follow the measured costs of checkpoints, in both directions, alike on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from fastckpt._core.policy.frequency.estimate import Estimate
from fastckpt._core.policy.frequency.failures import daly
from fastckpt._core.policy.frequency.intervals import (
    Costs,
    Fixed,
    Intervals,
    checked_overhead,
    fit,
    multiple,
    unsaved_steps,
    whole_steps,
)
from fastckpt._core.policy.frequency.overhead import (
    RECENT,
    Measurement,
    completed,
    costs,
    error,
    joined,
    paid,
    pooled,
)
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.policy.frequency.requested import AUTO, RequestedIntervals
from fastckpt._core.policy.frequency.stepping import GAIN, grows, less_often, more_often

TARGET = 0.85
"""Part of the overhead to aim at: below the bound, so that noise does not break it."""
AGREE = 3
"""Windows in a row that must agree."""
LATELY = 16
"""Windows that are averaged against noise."""
DOUBT = {1: 4.0, RECENT: 1.2}
"""Numbers of windows, and standard errors by which their cost must be above the bound for a decision.

One accident in a window is about one standard error.
"""
CROWDED = 0.9
"""Part of the iterations of a window during which a persist may be under way: else too few are left to compare."""
ACCIDENT = 1
"""Overruns in recent windows, of persists due before the previous one had ended, that may be accidents."""
MOST_PATIENCE = 48
"""Windows that must agree to save more often, at most, if that had to be taken back again and again."""
ASKED = "a time, or failures, ask for it, or the cost is not known to be within the bound"


@dataclass(frozen=True)
class Terms:
    """Constraints on tuning; the same on all ranks.

    Attributes:
        overhead: Part of training time that snapshots and persists may cost together.
        every: The intervals that the user requests.
        mtbf: Mean seconds between failures as observed; None for no opinion.
        notice: Steps from the end of a window until a decision takes effect, in which ranks exchange measurements.
    """

    overhead: float
    every: RequestedIntervals = AUTO
    mtbf: float | None = None
    notice: int = 0

    def __post_init__(self) -> None:
        checked_overhead(self.overhead)


@dataclass(frozen=True)
class TuningState:
    """The state of tuning; equal on all ranks that were given the same measurements.

    Attributes:
        terms: The constraints.
        intervals: The intervals in force.
        ends: The step that ends the window to be measured next.
        before: The measurement before these intervals.
        windows: Recent measurements, under these intervals or others.
        agreed: Windows in a row that ask for a change in the same direction.
        side: -1 if they ask for checkpoints more often, 1 if less often.
        patience: Windows that must agree to save more often.
        tried: True if checkpoints were made more often, and not less often since.
    """

    terms: Terms
    intervals: Intervals
    ends: int
    before: Measurement
    windows: tuple[Measurement, ...] = ()
    agreed: int = 0
    side: int = 0
    patience: int = AGREE
    tried: bool = False


@dataclass(frozen=True)
class Decision:
    """The decision at the end of a window.

    Attributes:
        step: The step after which the intervals are in force.
        intervals: The intervals from then on.
        overhead: The measured cost of checkpoints, as a part of training time.
        changed: True if the intervals differ from those before.
        why: The reason, for the event log.
    """

    step: int
    intervals: Intervals
    overhead: float
    changed: bool
    why: str


def window(intervals: Intervals) -> int:
    """Iterations to measure before the next decision: two persists, unless snapshots suffice much earlier."""
    return max(50, intervals.cycle, min(2 * intervals.storage, max(500, 20 * intervals.memory)))


def started(
    profile: Profile, terms: Terms, step: int = 0, known: Intervals | None = None
) -> tuple[TuningState, Decision]:
    """The first intervals, from a profile.

    Args:
        profile: The profile of the job.
        terms: The constraints.
        step: The step after which they are in force; the next checkpoints are counted from it.
        known: Intervals to which an earlier run was tuned: if they are as requested, the profile does not count.
    """
    persist = profile.slowdown * whole_steps(profile.duration / profile.iteration)
    first = Costs(profile.iteration, profile.stall + profile.copy_slowdown, persist, profile.duration)
    fixed = _fixed(terms, first, profile.iteration)
    wanted = fit(first, terms.overhead * TARGET, fixed)
    why = f"a snapshot in host memory stalls {profile.stall:.3g} s, and is durable after {profile.duration:.3g} s"
    if known and fixed.memory in (None, known.memory) and fixed.storage in (None, known.storage):
        # Tuned intervals rest on many windows, a profile on a few iterations.
        wanted, why = known, "an earlier run was tuned to them"
    intervals = replace(wanted, anchor=step, unsaved=_unsaved(terms, wanted, profile.iteration))
    before = Measurement(
        0, profile.iteration, profile.iteration, plain=Estimate(2, profile.iteration), durations=(profile.duration,)
    )
    state = TuningState(terms, intervals, step + window(intervals), before)
    return state, Decision(step, intervals, first.overhead(intervals), True, why)


def tuned(state: TuningState, measurements: Sequence[Measurement]) -> tuple[TuningState, Decision]:
    """Decide at the end of the window that ended at ``state.ends``.

    Checkpoints become less frequent at once if they cost more than the bound, or persists do not end in time. Several
    windows must agree before they become more frequent, or follow a time or failures. The same holds before they become
    less frequent because all windows together do not show a cost below the bound. A change is by a factor of two at
    most. Each time that more frequent checkpoints had to be taken back, the next attempt takes more windows.

    Args:
        state: As the last call returned it.
        measurements: One of each rank, in any order; raises ConfigError if there is none.
    """
    # 1. add the window to the recent ones   2. the bound is broken for certain: less often, now   3. persists crowd
    # out the iterations to compare with, or overrun: further apart, now   4. enough windows agree: the change they
    # ask for   5. else as before
    state = replace(state, windows=(*state.windows, joined(measurements))[-LATELY:])
    state = _counted(state)
    # One window must be far above the bound, several may be less so: a single pause is no reason to save less.
    for span, sigmas in DOUBT.items():
        seen = _seen(state, span)
        above = paid(seen, state.intervals) - sigmas * error(seen, state.intervals) > state.terms.overhead
        if above and len(state.windows) >= span:
            wide = less_often(state.intervals, _wanted(state, seen, 0.0), state.terms.every)
            return _decided(state, seen, wide, "the bound is broken")
    seen, last = _seen(state, RECENT), state.windows[-1]
    if last.persisting > CROWDED * last.iterations:
        return _decided(state, seen, _apart(state, seen), "persists leave no iterations to compare with")
    if seen.overruns > ACCIDENT:
        return _decided(state, seen, _apart(state, seen), f"{seen.overruns} persists were due while one was under way")
    if state.agreed >= (state.patience if state.side < 0 else AGREE):
        return _decided(state, seen, _nearer(state), "there is room" if state.side < 0 else ASKED)
    return _decided(state, seen, state.intervals, "")


def _seen(state: TuningState, span: int) -> Measurement:
    """The measurement of the last windows together."""
    return completed(pooled(state.windows[-span:]), state.before)


def _unsaved(terms: Terms, intervals: Intervals, pace: float) -> int:
    """Steps of a block without saves; an interval that a user gives in steps is kept."""
    if isinstance(terms.every.memory, int):
        return 0
    steps = unsaved_steps(intervals.memory, pace)
    return min(steps, intervals.storage - 1) if isinstance(terms.every.storage, int) else steps


def _fixed(terms: Terms, cost: Costs, pace: float) -> Fixed:
    """Constraints of users and failures, in steps."""
    both = cost.snapshot + cost.persist
    # A cost that was measured once has an infinite error: failures ask for nothing until there is a second one.
    least = daly(both, terms.mtbf) if terms.mtbf and isfinite(both) else 0.0
    return terms.every.fixed(pace, whole_steps(least / pace))


def _wanted(state: TuningState, seen: Measurement, errors: float) -> Intervals:
    """The intervals for a measurement, taken so many standard errors above its mean."""
    above = costs(seen, errors)
    return fit(above, TARGET * state.terms.overhead, _fixed(state.terms, above, seen.pace))


def _counted(state: TuningState) -> TuningState:
    """Count windows in a row that ask for a change in the same direction."""
    sides = [_side(state, span) for span in (RECENT, LATELY) if len(state.windows) >= AGREE]
    side = next((each for each in sides if each), 0)
    agreed = state.agreed + 1 if side == state.side else 1
    return replace(state, side=side, agreed=agreed if side else 0)


def _side(state: TuningState, span: int) -> int:
    """Return -1 to save more often, even at a standard error above the measured cost, 1 for less often, else 0."""
    seen, now = _seen(state, span), state.intervals
    above = costs(seen, 1.0)
    # A cost that may be above the bound counts as above, once all windows are known; one measurement proves nothing.
    may_be_above = span == LATELY == len(state.windows) and state.terms.overhead < above.overhead(now) < inf
    if may_be_above or grows(now, _fixed(state.terms, above, seen.pace)):
        return 1
    wanted = _wanted(state, seen, 1.0)
    return -1 if wanted.memory <= GAIN * now.memory or wanted.storage <= GAIN * now.storage else 0


def _apart(state: TuningState, seen: Measurement) -> Intervals:
    """Persists further apart, so that they end in time."""
    now, wanted = state.intervals, _wanted(state, seen, 0.0)
    # At least by 1/GAIN: a smaller change may not be enough to make the next persist end in time.
    longer = max(wanted.storage, whole_steps(now.storage / GAIN))
    return less_often(now, replace(wanted, storage=multiple(longer, wanted.memory)), state.terms.every)


def _nearer(state: TuningState) -> Intervals:
    """Intervals towards those that windows ask for; those in force if the new ones would break the bound."""
    now, every = state.intervals, state.terms.every
    for span in (RECENT, LATELY):
        if _side(state, span) != state.side:
            continue
        seen = _seen(state, span)
        wanted = _wanted(state, seen, 1.0)
        if state.side > 0:
            return less_often(now, wanted, every)
        nearer = more_often(now, wanted, every)
        if costs(seen, 1.0).overhead(nearer) <= state.terms.overhead:
            return nearer
    return now


def _decided(state: TuningState, seen: Measurement, intervals: Intervals, why: str) -> tuple[TuningState, Decision]:
    """The state after a window, and the decision."""
    was, step, cost = state.intervals, state.ends + state.terms.notice, paid(seen, state.intervals)
    unsaved = _unsaved(state.terms, intervals, seen.pace)
    changed = was.changed(intervals.memory, intervals.storage, step, unsaved)
    if (intervals.memory, intervals.storage) == (was.memory, was.storage):
        # The length of blocks follows the pace, if that is another one: else each change would put the next one off.
        now = was if was.unsaved <= 2 * unsaved <= 4 * was.unsaved else changed
        reason = f"as before: {_numbers(state, seen)}"
        return replace(state, intervals=now, ends=step + window(now)), Decision(step, now, cost, False, reason)
    patience, tried = state.patience, state.tried
    if intervals.memory < was.memory or intervals.storage < was.storage:
        tried = True
    elif tried:
        # More frequent saves had to be taken back: wait twice as long before the next attempt, as a backoff does.
        patience, tried = min(2 * patience, MOST_PATIENCE), False
    before = _seen(state, RECENT)
    # Overruns of the old intervals do not count against the new ones.
    windows = tuple(replace(each, overruns=0) for each in state.windows[-RECENT:])
    following = TuningState(
        state.terms, changed, step + window(changed), before, windows, patience=patience, tried=tried
    )
    reason = f"{why}; {_numbers(state, seen)}"
    return following, Decision(step, changed, cost, True, reason)


def _numbers(state: TuningState, seen: Measurement) -> str:
    each, bound = costs(seen), state.terms.overhead
    return (
        f"they cost {paid(seen, state.intervals):.2%} of training, of {bound:.2%} at most (a snapshot "
        f"{each.snapshot:.3g} s, a persist {each.persist:.3g} s, durable after {each.duration:.3g} s, an iteration "
        f"{each.iteration:.3g} s)"
    )
