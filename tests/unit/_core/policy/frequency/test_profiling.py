"""Length and result of profiling."""

import random
from dataclasses import replace
from itertools import permutations

import pytest

from fastckpt._core.policy.frequency.overhead import Iteration
from fastckpt._core.policy.frequency.profiling import (
    Profile,
    continued,
    joined,
    length,
    profiled,
    settled,
)
from tests.support.tables import for_each


@for_each((None, 50), (1, 8), (801, 9), (2000, 20), (10**9, 50))
def test_the_length_of_a_profile_follows_from_the_length_of_an_epoch(epoch, expected):
    assert length(epoch) == expected


@for_each(
    ("a pause", [1.0] * 9 + [50.0], 8),
    ("compiled late", [9.0, 5.0, 4.0, 3.0] + [1.0] * 8, 8),
    ("slow later", [9.0, 5.0, 1.0, 7.0] + [1.0] * 8, 10),
    ("three", [9.0, 8.0, 1.0], 1),
    ("slow for long", [9.0] * 5 + [1.0] * 3, 4),
)
def test_a_profile_leaves_out_the_warm_up(seconds, left):
    assert list(settled(seconds)) == seconds[-left:]


def some(plain=(), copied=(), slowed=(), stalls=(0.1,), durations=(20.0,)):
    """The profile of iterations of these kinds, and of the stalls of snapshots beside a persist."""
    iterations = [Iteration(seconds) for seconds in plain]
    iterations += [Iteration(seconds + stalls[0], stalls[0], snapshot=True) for seconds in copied]
    iterations += [Iteration(seconds, persisting=True) for seconds in slowed]
    iterations += [Iteration(1.0 + stall, stall, snapshot=True, persisting=True) for stall in stalls]
    return profiled(iterations, durations)


def test_a_profile_includes_the_time_that_a_persist_adds_to_iterations():
    """On average, for it may be few that it slows down much; a pause meanwhile is none of its doing."""
    rng = random.Random(6)
    for _ in range(20):
        plain = [9.0, 5.0, *(rng.gauss(1.0, 0.02) for _ in range(40))]
        slowed = [rng.gauss(1.0, 0.02) + 0.5 * (i % 4 == 0) for i in range(20)]
        found = some(plain, slowed=[*slowed, 50.0])
        assert found.slowdown == pytest.approx((20 * 0.125 + 3.0) / 21, abs=0.03)
    assert some([1.0] * 9, slowed=[0.9] * 5).slowdown == some([1.0] * 9).slowdown == 0.0


def test_ranks_agree_on_the_profile_of_the_slowest_and_on_the_smallest_counts():
    ranks = [
        Profile(1.0, 0.5, 2.0, 0.0, 0.0, 9, 4, 1, 9),
        Profile(1.1, 0.9, 1.0, 0.0, 0.0, 8, 5, 0, 8),
        Profile(0.9, 0.4, 3.0, 0.3, 0.2, 7, 6, 2, 9),
    ]
    expected = Profile(1.0, 0.9, 3.0, 0.0, 0.0, 7, 4, 0, 8)
    assert {joined(order) for order in permutations(ranks)} == {expected}
    assert joined([*ranks, None]) is None


PROFILE = Profile(0.5, 0.02, 3.0)


@for_each(
    (0.5, (50, 3, 1), 50, True),
    (0.5, (49, 3, 1), 50, False),
    (0.5, (50, 2, 1), 50, False),
    (0.5, (50, 3, 0), 50, False),
    (6.0, (9, 9, 1), 50, False),
    (100.0, (5, 5, 1), 5, True),
    (1e-9, (50, 25, 1), 50, True),
)
def test_a_profile_is_complete_after_enough_iterations_snapshots_and_persists(iteration, counts, most, expected):
    profile = Profile(iteration, 0.0, 0.0, 0.0, 0.0, *counts)
    assert profile.complete(most) is expected


def test_a_profile_over_several_runs_weighs_each_by_its_measurements():
    before = replace(PROFILE, iterations=30, snapshots=4, persists=0, plain=5)
    since = Profile(0.7, 0.07, 5.0, iterations=10, snapshots=1, persists=2, plain=3)
    both = continued(before, since)
    assert (both.iterations, both.snapshots, both.persists, both.plain) == (40, 5, 2, 8)
    assert both.compared and not before.compared
    assert both.iteration == pytest.approx(0.55)
    assert both.stall == pytest.approx(0.03)
    assert both.duration == 5.0
    assert continued(before, None) is before and continued(None, since) is since
    nothing = replace(since, iterations=0, snapshots=0, persists=0, plain=0)
    assert continued(PROFILE, nothing) == nothing
    assert continued(before, nothing).iteration == 0.5


def test_a_profile_needs_a_snapshot_and_counts_a_missing_persist_as_free():
    assert some([1.0] * 9, stalls=()) is None
    assert some([1.0] * 9, durations=()).duration == 0.0
