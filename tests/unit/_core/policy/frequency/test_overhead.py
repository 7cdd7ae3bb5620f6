"""Estimates of checkpoint costs from iterations: known costs are found, outliers are not taken for costs."""

import json
import random
from dataclasses import replace
from statistics import fmean

import pytest

from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.overhead import (
    Iteration,
    Measurement,
    completed,
    costs,
    error,
    joined,
    longest,
    measured,
    paid,
    pooled,
)
from tests.support.tables import for_each


def window(memory=5, storage=20, during=8, stall=0.2, busy=0.1, slow=0.05, noise=0.0, cycles=5, seed=0, unsaved=0):
    """Iterations of 1 s: a snapshot stalls and slows its iteration down, a persist slows down those behind it."""
    rng = random.Random(seed)
    found, every = [], Intervals(memory, storage, -storage, unsaved)
    for step in range(cycles * storage):
        snapshot, persisting = every.snapshots(step), step % storage < during
        work = 1 + noise * rng.gauss(0, 1) + (busy if snapshot else 0) + (slow if persisting else 0)
        found.append(Iteration(work + (stall if snapshot else 0), stall if snapshot else 0, snapshot, persisting))
    return found


def test_known_costs_of_checkpoints_are_estimated_correctly():
    seen = measured(window(), [8.3] * 5)
    assert (seen.iterations, seen.iteration, seen.persists, seen.persisting) == (100, 1.0, 5, 40)
    found = costs(seen)
    assert found.snapshot == pytest.approx(0.3)
    assert found.persist == pytest.approx(0.4)
    assert found.duration == 8.3
    assert paid(seen, Intervals(5, 20)) == pytest.approx(sum(each.seconds for each in window()) / 100 - 1)
    assert error(seen, Intervals(5, 20)) < 1e-6


@for_each(
    ("a snapshot each iteration", 1, 4, 2, 0, 0.2, 0.1),
    ("each persisted", 10, 10, 6, 0, 0.3, 0.3),
    ("always both", 1, 1, 1, 0, 0.2, 0.0),
    ("blocks without saves", 1, 4, 2, 3, 0.3, 0.1),
)
def test_estimates_need_iterations_without_a_snapshot_or_persist_to_compare_with(
    memory, storage, during, unsaved, snapshot, persist
):
    """Without iterations to compare with, of a snapshot only its stall is known, and of a persist nothing."""
    found = costs(measured(window(memory, storage, during, cycles=20, unsaved=unsaved), [during - 0.01] * 20))
    within = 0.11 if during == storage else 0.011
    assert (found.snapshot, found.persist) == pytest.approx((snapshot, persist), abs=within)


def test_what_happens_right_after_a_save_or_a_persist_is_a_part_of_its_cost():
    """Iterations of 10 ms: the saver takes 3 ms of each of the first three of a snapshot, five of a persist."""
    found = []
    for step in range(400):
        snapshot, persisting = step % 20 == 0, step % 200 < 2
        seconds = 0.01 + 0.003 * (step % 20 < 3 or step % 200 < 5)
        found.append(Iteration(seconds, 0.0, snapshot, persisting))
    seen = measured(found, [0.02] * 2)
    assert seen.plain.mean == pytest.approx(0.01)
    assert costs(seen).overhead(Intervals(20, 200)) == pytest.approx(
        fmean(each.seconds for each in found) / 0.01 - 1, abs=0.001
    )


def test_processor_time_counts_where_it_is_more_than_the_time_that_training_loses():
    found = [replace(each, processor=0.9 + 0.7 * each.snapshot + 0.2 * each.persisting) for each in window()]
    seen = costs(measured(found, [8.3] * 5))
    assert (seen.snapshot, seen.persist) == pytest.approx((0.7, 8 * 0.2))
    pause = replace(found[20], seconds=500.0, processor=400.0)
    assert costs(measured([*found[:20], pause, *found[21:]], [8.3] * 5)).snapshot == pytest.approx(0.7, abs=0.05)


def test_costs_that_were_not_measured_are_kept_from_before():
    before = measured(window(), [8.3] * 5)
    seen = completed(measured([Iteration(2.0)] * 50), before)
    assert (seen.snapshot, seen.slowdown, seen.durations) == (before.snapshot, before.slowdown, before.durations)
    assert seen.iteration == 2.0


@for_each(0, 49, 98)
def test_a_pause_for_an_evaluation_is_no_cost_of_checkpoints(at):
    """The overhead is not beyond doubt above the 8% that it is."""
    iterations = window(noise=0.01)
    iterations[at] = replace(iterations[at], seconds=iterations[at].seconds + 500)
    seen = measured(iterations, [8.3] * 5)
    assert paid(seen, Intervals(5, 20)) - 2 * error(seen, Intervals(5, 20)) < 0.09
    assert seen.iteration < 1.1


def test_a_stall_of_one_rank_delays_all_and_is_counted_once():
    """One rank stalls for 0.5 s, and up to three wait for it in the same iteration."""
    here, elsewhere = (measured(window(stall=stall, busy=0.5 - stall), [8.0]) for stall in (0.5, 0.0))
    for ranks in ([elsewhere, here, elsewhere, elsewhere], [elsewhere, here]):
        assert costs(joined(ranks)).snapshot == pytest.approx(0.5)


def test_measurements_survive_a_round_trip_as_json():
    seen = measured(window(noise=0.1), [8.3, 8.5], 1)
    assert Measurement.from_json(json.loads(json.dumps(seen.to_json()))) == seen
    assert costs(pooled([seen, seen])).snapshot == pytest.approx(costs(seen).snapshot)


def test_the_longest_of_many_stalls_may_be_an_outlier():
    assert [longest(each) for each in ([], [3.0], [3.0, 9.0], [3.0, 900.0, 4.0])] == [0.0, 3.0, 9.0, 4.0]
