"""How long to profile, and what is made of what was measured."""

import random
from dataclasses import replace
from itertools import permutations

import pytest

from fastckpt._core.policy.frequency.intervals import Profile
from fastckpt._core.policy.frequency.profiling import (
    ProfileSamples,
    ProfilingProgress,
    agreed,
    continued,
    deviation,
    joined,
    length,
    profiled,
    settled,
)
from fastckpt.errors import ConfigError


@pytest.mark.parametrize(
    ("epoch", "expected"), [(None, 50), (1, 8), (100, 8), (801, 9), (2000, 20), (4999, 50), (5001, 50), (10**9, 50)]
)
def test_length(epoch, expected):
    assert length(epoch) == expected


def test_an_epoch_has_iterations():
    with pytest.raises(ConfigError, match="an epoch has 0 iterations; give 1 or more"):
        length(0)


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        ([1.0] * 10, 8),
        ([9.0, 5.0] + [1.0] * 8, 8),
        ([9.0, 5.0, 4.0, 3.0] + [1.0] * 8, 8),
        ([9.0, 5.0, 1.0, 7.0] + [1.0] * 8, 10),
        ([1.0] * 9 + [50.0], 8),
        ([9.0], 1),
        ([9.0, 1.0], 1),
        ([9.0, 8.0, 1.0], 1),
        ([9.0] * 5 + [1.0] * 3, 4),
    ],
    ids=["even", "two slow", "compiled late", "slow later", "a pause", "one", "two", "three", "slow for long"],
)
def test_the_warm_up_is_left_out(seconds, left):
    assert list(settled(seconds)) == seconds[-left:]


def test_a_pause_does_not_move_the_profile():
    rng = random.Random(5)
    for _ in range(500):
        iterations = [rng.gauss(1.0, 0.02) for _ in range(50)]
        iterations[0], iterations[1], iterations[2] = 30.0, 3.0, 2.0
        iterations[rng.randrange(3, 50)] = 100.0
        samples = ProfileSamples(iterations, [0.1 * each for each in iterations], [0.5, 0.3, 0.31], [9.0, 2.0, 2.1])
        profile = profiled(samples)
        assert profile.iteration == pytest.approx(1.0, abs=0.02)
        assert profile.update == pytest.approx(0.1, abs=0.002)
        assert (profile.host_copy, profile.storage) == (0.31, 2.1)


def test_what_a_persist_adds_to_iterations_is_seen():
    """On average, for it may be few that it slows down much; a pause meanwhile is none of its doing."""
    rng = random.Random(6)
    for _ in range(500):
        plain = [9.0, 5.0, *(rng.gauss(1.0, 0.02) for _ in range(40))]
        slowed = [rng.gauss(1.0, 0.02) + 0.5 * (i % 4 == 0) for i in range(20)]
        found = profiled(ProfileSamples(plain, plain, [0.1], [20.0], slowed=[*slowed, 50.0]))
        assert found.slowdown == pytest.approx((20 * 0.125 + 3.0) / 21, abs=0.03)
    faster = ProfileSamples([1.0] * 9, [0.1] * 9, [0.1], [5.0], slowed=[0.9] * 5)
    assert profiled(faster).slowdown == profiled(replace(faster, slowed=())).slowdown == 0.0


def test_an_update_is_no_longer_than_its_iteration():
    assert profiled(ProfileSamples([1.0] * 9, [1.1] * 9, [1.0], [1.0])).update == 1.0


@pytest.mark.parametrize("name", ["iterations", "updates", "host_copies", "persists"])
def test_what_was_not_measured_is_named(name):
    samples = replace(ProfileSamples([1.0], [0.1], [0.5], [2.0]), **{name: []})
    with pytest.raises(ConfigError, match=f"{name} of a profile are empty; measure each"):
        profiled(samples)


def test_deviation_is_that_of_what_is_normally_distributed():
    rng = random.Random(1)
    assert deviation([rng.gauss(5, 2) for _ in range(10000)]) == pytest.approx(2, rel=0.05)
    assert deviation([1.0, 1.0, 1.0, 99.0]) == 0


def test_ranks_agree_on_the_slowest():
    ranks = [
        Profile(1.0, 0.2, 0.5, 2.0),
        Profile(1.1, 0.1, 0.9, 1.0),
        Profile(0.9, 0.1, 0.4, 3.0, slowdown=0.3),
    ]
    expected = Profile(1.0, 0.2, 0.9, 3.0)
    assert {joined(order) for order in permutations(ranks)} == {expected}
    with pytest.raises(ConfigError, match="no rank has made a profile"):
        joined([])


def test_what_a_copy_in_the_background_adds_counts_as_far_as_it_is_beyond_doubt():
    rng = random.Random(7)
    for _ in range(200):
        plain = [rng.gauss(1.0, 0.02) for _ in range(30)]
        samples = ProfileSamples(plain, plain, [0.1], [20.0], copied=[rng.gauss(1.2, 0.02) for _ in range(20)])
        assert profiled(samples).copy_slowdown == pytest.approx(0.19, abs=0.03)
        noise = replace(samples, copied=[rng.gauss(1.0, 0.02) for _ in range(20)])
        assert profiled(noise).copy_slowdown < 0.015
        assert profiled(replace(samples, copied=[1.2, 1.3])).copy_slowdown == 0.0, "two say nothing"


PROFILE = Profile(0.5, 0.1, 0.02, 3.0)


@pytest.mark.parametrize(
    ("iteration", "counts", "most", "expected"),
    [
        (0.5, (50, 3, 1), 50, True),
        (0.5, (49, 3, 1), 50, False),
        (0.5, (50, 2, 1), 50, False),
        (0.5, (50, 3, 0), 50, False),
        (0.5, (8, 3, 1), 8, True),
        (6.0, (10, 10, 1), 50, True),
        (6.0, (9, 9, 1), 50, False),
        (100.0, (6, 6, 1), 50, True),
        (100.0, (5, 5, 1), 50, False),
        (100.0, (5, 5, 1), 5, True),
        (1e-9, (50, 25, 1), 50, True),
    ],
)
def test_when_a_profile_is_complete(iteration, counts, most, expected):
    progress = ProfilingProgress(replace(PROFILE, iteration=iteration, update=0.0), *counts)
    assert progress.complete(most) is expected


def test_each_run_counts_for_what_it_measured():
    before = ProfilingProgress(PROFILE, iterations=30, snapshots=4, persists=0, plain=5)
    since = ProfilingProgress(replace(PROFILE, iteration=0.7, host_copy=0.07, storage=5.0), 10, 1, 2, 3)
    both = continued(before, since)
    assert (both.iterations, both.snapshots, both.persists, both.plain) == (40, 5, 2, 8)
    assert both.compared and not before.compared
    assert both.profile.iteration == pytest.approx(0.55)
    assert both.profile.host_copy == pytest.approx(0.03)
    assert both.profile.storage == 5.0
    assert continued(before, None) is before and continued(None, since) is since
    nothing = replace(since, iterations=0, snapshots=0, persists=0)
    assert continued(replace(nothing, profile=PROFILE), nothing).profile == nothing.profile
    assert continued(before, nothing).profile.iteration == 0.5


def test_ranks_agree_on_the_progress_of_the_last():
    ranks = [ProfilingProgress(PROFILE, 30, 4, 1, 9), ProfilingProgress(replace(PROFILE, host_copy=0.1), 29, 5, 0, 8)]
    for order in permutations(ranks):
        assert agreed(order) == ProfilingProgress(replace(PROFILE, host_copy=0.1), 29, 4, 0, 8)
    assert agreed([*ranks, None]) is None
