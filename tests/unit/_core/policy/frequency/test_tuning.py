"""Tuning of intervals from measured windows: tables, and generated measurements."""

import random
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise

import pytest

from fastckpt._core.policy.frequency.estimate import Estimate
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.overhead import RECENT, Measurement
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.policy.frequency.requested import AUTO, RequestedIntervals
from fastckpt._core.policy.frequency.tuning import AGREE, LATELY, Decision, Terms, TuningState, started, tuned
from tests.support.tables import for_each

PROFILE = Profile(iteration=1.0, stall=0.3, duration=12.3)
TERMS = Terms(0.05)


def seen(stall=0.3, slowdown=0.01, duration=12.0, overruns=0, iteration=1.0, error=0.0) -> Measurement:
    """A window in which snapshots, and iterations under a persist, took so much longer."""
    during = max(1, round(duration / iteration))
    persists = max(1, 80 // during)
    return Measurement(
        iterations=100,
        iteration=iteration,
        pace=iteration,
        stall=Estimate(10, stall),
        plain=Estimate(50, iteration),
        snapshot=Estimate(10, stall, 9 * error**2),
        slowdown=Estimate(50, slowdown, 49 * error**2),
        persisting=persists * during,
        persists=persists,
        durations=(duration,) * 5,
        overruns=overruns,
    )


def follow(state: TuningState, *windows: Measurement) -> tuple[TuningState, list[Decision]]:
    decisions = []
    for each in windows:
        state, decision = tuned(state, [each])
        decisions.append(decision)
    return state, decisions


def pair(intervals: Intervals) -> tuple[int, int]:
    return intervals.memory, intervals.storage


@for_each(
    (TERMS, None, (8, 16)),
    (TERMS, Intervals(10, 40), (10, 40)),
    (Terms(0.05, RequestedIntervals(5, 50)), None, (5, 50)),
    (Terms(0.05, RequestedIntervals(5, 50)), Intervals(10, 40), (5, 50)),
    (Terms(0.05, RequestedIntervals(5, None)), Intervals(10, 40), (5, 20)),
    (Terms(0.05, RequestedIntervals(None, 60)), None, (10, 60)),
    (Terms(0.05, RequestedIntervals(None, timedelta(minutes=1))), None, (10, 60)),
    (Terms(0.05, mtbf=1e6), None, (8, 776)),
    (Terms(0.05, mtbf=10.0), None, (8, 16)),
)
def test_the_first_intervals_are_those_requested(terms, known, expected):
    assert pair(started(PROFILE, terms, known=known)[1].intervals) == expected


@dataclass(frozen=True)
class Course:
    """So many windows alike, the intervals after them, the windows that changed these, and the first reason."""

    window: Measurement
    count: int
    intervals: tuple[int, int]
    changes: tuple[int, ...] = ()
    why: str = ""
    profile: Profile = PROFILE
    terms: Terms = TERMS
    known: Intervals | None = None


LONG = Intervals(64, 128)
BROKEN, ROOM = "the bound is broken", "there is room"
COURSES = {
    "within the bound": Course(seen(error=0.001), 40, (8, 16), why="as before: they cost 4.50% of training, of 5.00%"),
    "a clear breach": Course(seen(stall=3.0), 1, (16, 32), (0,), f"{BROKEN}; they cost 38.25% of training, of 5.00%"),
    "a breach that may be noise, until it is certain": Course(
        seen(stall=0.5, error=0.03), RECENT, (15, 30), (RECENT - 1,), BROKEN
    ),
    "5% of 3.5% allowed, give or take as much again": Course(
        seen(stall=0.4, slowdown=0.0, error=0.012),
        5,
        (15, 45),
        (RECENT - 1,),
        f"{BROKEN}; they cost 5.00% of training",
        replace(PROFILE, stall=0.4, duration=12.4),
        Terms(0.035),
        Intervals(8, 32),
    ),
    "a slowdown that the profile has seen": Course(
        seen(slowdown=0.2), 10, (40, 120), profile=replace(PROFILE, slowdown=0.2), terms=Terms(0.035)
    ),
    "a persist that ends just before the next begins": Course(
        replace(seen(slowdown=0.0, duration=16.0), persisting=100), 1, (10, 20), (0,), "leave no iterations to compare"
    ),
    "room, for more windows": Course(seen(), 6, (32, 64), (AGREE + 1,), ROOM, known=LONG),
    "one step would cost 6%, two 3%": Course(
        seen(stall=0.06, slowdown=0.0, duration=0.5), 50, (2, 2), profile=replace(PROFILE, stall=0.06, duration=0.56)
    ),
    "snapshots take 4%: a persist fits beside them every 100 steps, not every 50": Course(
        seen(stall=0.08, slowdown=0.05), 40, (2, 100), (4,), ROOM, known=Intervals(2, 200)
    ),
    "several persists that took too long": Course(
        seen(duration=30.0, slowdown=0.0, overruns=3), 1, (8, 32), (0,), "3 persists were due while one was under way"
    ),
    "a request, whatever it costs": Course(
        seen(stall=3.0, overruns=5), 10, (2, 4), why="of 5.00% at most", terms=Terms(0.05, RequestedIntervals(2, 4))
    ),
}


@for_each(*COURSES.values())
def test_windows_move_intervals_by_what_they_cost(course):
    state, first = started(course.profile, course.terms, known=course.known)
    assert course.known or first.overhead <= course.terms.overhead or course.terms.every is not AUTO
    state, decisions = follow(state, *[course.window] * course.count)
    changes = tuple(i for i, each in enumerate(decisions) if each.changed)
    assert (pair(state.intervals), changes) == (course.intervals, course.changes)
    assert course.why in decisions[changes[0] if changes else -1].why


def test_failures_ask_for_nothing_while_the_error_of_a_cost_is_unknown():
    """Persists that are shorter than an iteration are seldom seen: of one that was seen once the error is infinite."""
    without = replace(seen(), slowdown=Estimate())
    state, _ = started(PROFILE, Terms(0.05, mtbf=15.6))
    after, decisions = follow(state, replace(seen(), slowdown=Estimate(1, 0.01)), *[without] * LATELY)
    assert pair(after.intervals) == pair(state.intervals) and not any(each.changed for each in decisions)


def random_window(rng: random.Random) -> Measurement:
    return seen(
        stall=10 ** rng.uniform(-4, 2),
        slowdown=rng.choice([0.0, -0.01, 10 ** rng.uniform(-4, 1)]),
        duration=10 ** rng.uniform(-3, 3),
        overruns=rng.choice([0, 0, 0, 1, 5]),
        iteration=10 ** rng.uniform(-1, 1),
        error=rng.choice([0.0, 0.01, 1.0]),
    )


REQUESTS = [
    AUTO,
    RequestedIntervals(3, None),
    RequestedIntervals(None, timedelta(minutes=2)),
]


@for_each(*REQUESTS)
def test_changes_of_intervals_are_bounded_and_in_time_for_any_measurements(every):
    rng = random.Random(8)
    for _ in range(5):
        state, before = started(PROFILE, Terms(rng.choice([0.01, 0.05]), every, rng.choice([None, 1e5]), notice=3))
        for _ in range(20):
            ends = state.ends
            ranks = [random_window(rng) for _ in range(3)]
            found = tuned(state, ranks)
            assert found == tuned(state, ranks[::-1]), "whatever order they are in"
            state, decision = found
            was, now = before.intervals, decision.intervals
            assert decision.step == ends + 3 and state.intervals == now and state.ends > decision.step
            assert was.memory / 2 <= now.memory <= 2 * was.memory
            assert was.storage / 2 <= now.storage <= 2 * was.storage
            assert now.anchor <= decision.step and now.storage % now.memory == 0
            assert decision.changed is (pair(was) != pair(now)) and decision.why
            assert every.memory != 3 or now.memory == 3
            before = decision


def test_an_interval_given_as_a_time_follows_the_pace_of_steps():
    state, _ = started(PROFILE, Terms(0.05, RequestedIntervals(None, timedelta(minutes=10))))
    assert pair(state.intervals)[1] in range(600, 615)
    state, decisions = follow(state, *[seen(iteration=0.4)] * 12)
    assert state.intervals.storage == pytest.approx(1500, rel=0.25)
    assert all(b.intervals.storage <= 2 * a.intervals.storage for a, b in pairwise(decisions))
    assert any("a time, or failures, ask for it" in each.why for each in decisions)
    state, _ = follow(state, *[seen(iteration=2.0)] * 12)
    assert state.intervals.storage == pytest.approx(300, rel=0.25)
