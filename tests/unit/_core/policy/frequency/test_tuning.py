"""Tuning of intervals from measured windows: tables, and generated measurements."""

import random
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest

from fastckpt._core.policy.frequency.estimate import Estimate
from fastckpt._core.policy.frequency.failures import daly
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.overhead import RECENT, Measurement
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.policy.frequency.requested import AUTO, RequestedIntervals
from fastckpt._core.policy.frequency.stepping import less_often, more_often
from fastckpt._core.policy.frequency.tuning import AGREE, LATELY, Decision, Terms, TuningState, started, tuned, window
from fastckpt.errors import ConfigError

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


def test_the_first_intervals_come_from_the_profile():
    state, decision = started(PROFILE, TERMS, step=7)
    assert decision.intervals == state.intervals == Intervals(8, 16, 7)
    assert (decision.step, decision.changed, state.ends) == (7, True, 7 + window(state.intervals))
    assert decision.why == "a snapshot in host memory stalls 0.3 s, and is durable after 12.3 s"


@pytest.mark.parametrize(
    ("terms", "known", "expected"),
    [
        (TERMS, None, (8, 16)),
        (TERMS, Intervals(10, 40), (10, 40)),
        (Terms(0.05, RequestedIntervals(5, 50)), None, (5, 50)),
        (Terms(0.05, RequestedIntervals(5, 50)), Intervals(10, 40), (5, 50)),
        (Terms(0.05, RequestedIntervals(5, None)), Intervals(10, 40), (5, 20)),
        (Terms(0.05, RequestedIntervals(None, 60)), None, (10, 60)),
        (Terms(0.05, RequestedIntervals(None, timedelta(minutes=1))), None, (10, 60)),
        (Terms(0.05, mtbf=1e6), None, (8, 776)),
        (Terms(0.05, mtbf=10.0), None, (8, 16)),
    ],
    ids=["auto", "tuned before", "steps", "steps, not as before", "memory", "storage", "a time", "failures", "many"],
)  # fmt: skip
def test_the_first_intervals_are_those_requested(terms, known, expected):
    assert pair(started(PROFILE, terms, known=known)[1].intervals) == expected


def test_intervals_within_the_bound_stay():
    state, _ = started(PROFILE, TERMS)
    after, decisions = follow(state, *[seen(error=0.001)] * 40)
    assert pair(after.intervals) == (8, 16)
    assert not any(each.changed for each in decisions)
    assert "as before: they cost 4.50% of training, of 5.00% at most" in decisions[-1].why


def test_failures_ask_for_nothing_while_the_error_of_a_cost_is_unknown():
    """Persists that are shorter than an iteration are seldom seen: of one that was seen once the error is infinite."""
    without = replace(seen(), slowdown=Estimate())
    state, _ = started(PROFILE, Terms(0.05, mtbf=15.6))
    after, decisions = follow(state, replace(seen(), slowdown=Estimate(1, 0.01)), *[without] * LATELY)
    assert pair(after.intervals) == pair(state.intervals) and not any(each.changed for each in decisions)


def test_a_clear_breach_of_the_bound_doubles_intervals_at_once():
    state, _ = started(PROFILE, TERMS)
    state, (decision,) = follow(state, seen(stall=3.0))
    assert decision.changed and pair(decision.intervals) == (16, 32)
    assert decision.overhead == pytest.approx(0.3825, abs=1e-4)
    assert "the bound is broken; they cost 38.25% of training, of 5.00% at most" in decision.why
    state, (decision,) = follow(state, seen(stall=3.0))
    assert pair(decision.intervals) == (32, 64)


def test_a_breach_that_may_be_noise_changes_nothing_until_it_is_certain():
    state, _ = started(PROFILE, TERMS)
    _, decisions = follow(state, *[seen(stall=0.5, error=0.03)] * 20)
    first = next(i for i, each in enumerate(decisions) if each.changed)
    assert first == RECENT - 1


def test_a_cost_of_half_above_the_bound_is_corrected_soon():
    """5% of 3.5% allowed, in every window, give or take as much again."""
    state, _ = started(replace(PROFILE, stall=0.4, duration=12.4), Terms(0.035), known=Intervals(8, 32))
    _, decisions = follow(state, *[seen(stall=0.4, slowdown=0.0, error=0.012)] * 5)
    assert decisions[0].overhead == pytest.approx(0.05)
    assert [each.changed for each in decisions] == [False, False, False, True, False]
    assert "the bound is broken" in decisions[3].why


def test_the_share_of_an_iteration_that_a_persist_takes_comes_from_the_profile():
    state, decision = started(replace(PROFILE, slowdown=0.2), Terms(0.035))
    assert decision.overhead <= 0.035
    assert pair(decision.intervals) == (40, 120)
    _, decisions = follow(state, *[seen(slowdown=0.2)] * 10)
    assert not any(each.changed for each in decisions)


def test_persists_without_iterations_between_them_are_made_rarer_at_once():
    """Each ends just before the next begins: what it costs would never be known."""
    state, _ = started(PROFILE, TERMS)
    crowded = replace(seen(slowdown=0.0, duration=16.0), persisting=100)
    _, (decision,) = follow(state, crowded)
    assert pair(decision.intervals) == (10, 20)
    assert "persists leave no iterations to compare with" in decision.why


def test_shorter_intervals_are_tried_only_after_several_windows():
    state, _ = started(PROFILE, TERMS, known=Intervals(64, 128))
    state, decisions = follow(state, *[seen()] * 6)
    changed = [i for i, each in enumerate(decisions) if each.changed]
    assert changed[0] >= AGREE - 1
    assert pair(decisions[changed[0]].intervals) == (32, 64)
    assert "there is room" in decisions[changed[0]].why


def test_shorter_intervals_that_would_break_the_bound_are_not_tried():
    """One step: 6%, two: 3%; a job that rests at two is not moved however long it stays below."""
    state, _ = started(replace(PROFILE, stall=0.06, duration=0.56), TERMS)
    state, decisions = follow(state, *[seen(stall=0.06, slowdown=0.0, duration=0.5)] * 50)
    assert pair(state.intervals) == (2, 2)
    assert not any(each.changed for each in decisions)


def test_persists_are_not_made_more_often_beyond_the_bound():
    """Snapshots take 4% already: a persist every 100 steps fits beside them, every 50 does not."""
    state, _ = started(PROFILE, TERMS, known=Intervals(2, 200))
    state, _ = follow(state, *[seen(stall=0.08, slowdown=0.05)] * 40)
    assert pair(state.intervals) == (2, 100)


def test_each_failed_attempt_at_shorter_intervals_delays_the_next_one():
    """A job that is dear whenever it saves often: the windows before each new attempt double."""
    state, _ = started(PROFILE, TERMS, known=Intervals(64, 128))
    waits, quiet = [], 0
    for _ in range(400):
        state, decision = tuned(state, [seen(stall=6.0 if state.intervals.memory < 64 else 0.3)])
        quiet += 1
        if decision.changed and decision.intervals.memory < 64:
            waits.append(quiet)
        if decision.changed:
            quiet = 0
    assert len(waits) <= 12
    assert waits[4] >= 4 * waits[0]


@pytest.mark.parametrize("overruns", [0, 1])
def test_one_persist_that_took_too_long_changes_no_interval(overruns):
    state, _ = started(PROFILE, TERMS)
    _, (decision,) = follow(state, seen(overruns=overruns))
    assert not decision.changed


def test_several_persists_that_take_too_long_are_made_rarer_at_once():
    state, _ = started(PROFILE, TERMS)
    _, (decision,) = follow(state, seen(duration=30.0, slowdown=0.0, overruns=3))
    assert pair(decision.intervals) == (8, 32)
    assert "3 persists were due while one was under way" in decision.why


def test_a_requested_interval_is_kept_whatever_it_costs():
    state, _ = started(PROFILE, Terms(0.05, RequestedIntervals(2, 4)))
    state, decisions = follow(state, *[seen(stall=3.0, overruns=5)] * 10)
    assert pair(state.intervals) == (2, 4)
    assert "they cost 153" in decisions[-1].why and "of 5.00% at most" in decisions[-1].why


def test_an_interval_given_as_a_time_follows_the_pace_of_steps():
    state, _ = started(PROFILE, Terms(0.05, RequestedIntervals(None, timedelta(minutes=10))))
    assert pair(state.intervals)[1] in range(600, 615)
    state, decisions = follow(state, *[seen(iteration=0.4)] * 12)
    assert state.intervals.storage == pytest.approx(1500, rel=0.25)
    assert all(b.intervals.storage <= 2 * a.intervals.storage for a, b in pairwise(decisions))
    assert any("a time, or failures, ask for it" in each.why for each in decisions)
    state, _ = follow(state, *[seen(iteration=2.0)] * 12)
    assert state.intervals.storage == pytest.approx(300, rel=0.25)


def test_the_optimum_for_failures_is_used_where_it_is_larger():
    """A persist costs 0.12 s, and its snapshot 0.3 s."""
    state, _ = started(PROFILE, Terms(0.05, mtbf=1e6))
    state, _ = follow(state, *[seen()] * 30)
    assert state.intervals.storage == pytest.approx(daly(0.42, 1e6), rel=0.25)
    rare, _ = started(PROFILE, Terms(0.05, mtbf=100.0))
    rare, _ = follow(rare, *[seen()] * 30)
    assert pair(rare.intervals) == (8, 16)


def test_decisions_do_not_depend_on_the_order_of_measurements():
    rng = random.Random(6)
    for _ in range(60):
        state, _ = started(PROFILE, TERMS)
        for _ in range(6):
            ranks = [random_window(rng) for _ in range(5)]
            shuffled = rng.sample(ranks, 5)
            one, other = tuned(state, ranks), tuned(state, shuffled)
            assert one == other
            state = one[0]


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
    RequestedIntervals(None, 60),
    RequestedIntervals(timedelta(seconds=20), None),
    RequestedIntervals(None, timedelta(minutes=2)),
]


@pytest.mark.parametrize("every", REQUESTS, ids=str)
def test_changes_of_intervals_are_bounded_and_in_time_for_any_measurements(every):
    """Thousands of windows of wild costs."""
    rng = random.Random(8)
    for _ in range(30):
        state, before = started(PROFILE, Terms(rng.choice([0.01, 0.05]), every, rng.choice([None, 1e5]), notice=3))
        for _ in range(20):
            ends = state.ends
            state, decision = tuned(state, [random_window(rng)])
            was, now = before.intervals, decision.intervals
            assert decision.step == ends + 3 and state.intervals == now and state.ends > decision.step
            assert was.memory / 2 <= now.memory <= 2 * was.memory
            assert was.storage / 2 <= now.storage <= 2 * was.storage
            assert now.anchor <= decision.step and now.storage % now.memory == 0
            assert decision.changed is (pair(was) != pair(now)) and decision.why
            assert every.memory != 3 or now.memory == 3
            assert every.storage != 60 or now.storage == 60
            before = decision


@pytest.mark.parametrize(
    ("wanted", "expected"), [((9, 18), (10, 20)), ((8, 16), (8, 16)), ((8, 40), (8, 24)), ((1, 1), (5, 10))]
)
def test_intervals_that_would_be_hardly_shorter_are_not_changed(wanted, expected):
    assert pair(more_often(Intervals(10, 20), Intervals(*wanted), AUTO)) == expected


def test_changes_of_intervals_go_towards_the_target_in_bounded_strides():
    rng = random.Random(9)
    for _ in range(3000):
        now, wanted = (Intervals(m, m * rng.randint(1, 30)) for m in (rng.randint(1, 50), rng.randint(1, 50)))
        up, down = less_often(now, wanted, AUTO), more_often(now, wanted, AUTO)
        assert now.memory <= up.memory <= 2 * now.memory and now.storage <= up.storage <= 2 * now.storage
        assert now.memory >= down.memory >= now.memory / 2
        assert now.storage / 2 <= down.storage < now.storage + now.memory


def test_a_decision_without_any_measurement_is_refused():
    state, _ = started(PROFILE, TERMS)
    with pytest.raises(ConfigError, match="no rank has measured anything"):
        tuned(state, [])
    with pytest.raises(ConfigError, match=r"overhead is 5; give the part"):
        Terms(5)
