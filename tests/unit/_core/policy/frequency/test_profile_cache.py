"""A profile that was kept is used under the same circumstances, and never raises: tables."""

import json
from dataclasses import replace

from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.profile_cache import (
    Ignored,
    ProfileKey,
    Remembered,
    from_json,
    from_numbers,
    to_json,
    to_numbers,
)
from fastckpt._core.policy.frequency.profiling import Profile
from tests.support.tables import for_each

HERE = ProfileKey(10**9, 8, "ext4", "cpu", {"fastckpt": "0.1.0", "torch": "2.13.0"})
PROFILE = Profile(1.0, 0.1, 3.0, 0.05, 0.02, iterations=20, snapshots=7, persists=1, plain=9)
KNOWN = Remembered(PROFILE, Intervals(4, 16))
TEXT = to_json(KNOWN, HERE, 0.035)


def test_a_cached_profile_is_found_again():
    assert from_json(TEXT, HERE, 0.035) == KNOWN
    untuned = replace(KNOWN, intervals=None)
    assert from_json(to_json(untuned, HERE, 0.035), HERE, 0.035) == untuned


def test_another_overhead_keeps_the_profile_and_drops_the_intervals():
    assert from_json(TEXT, HERE, 0.01) == Remembered(PROFILE)


@for_each(("size", 1), ("world_size", 4), ("storage", "nfs"), ("device", "NVIDIA H200"), ("versions", {"torch": "3"}))
def test_a_cached_profile_of_other_circumstances_is_ignored(name, value):
    elsewhere = replace(HERE, **{name: value})
    assert from_numbers(to_numbers(PROFILE, elsewhere), HERE) is None
    assert from_json(TEXT, elsewhere, 0.035) == Ignored(f"it is of other circumstances: {name}")


def forged(**changes):
    """What was kept, with other content."""
    content = json.loads(TEXT) | changes
    return json.dumps({name: value for name, value in content.items() if value is not ...})


@for_each(
    ("[" * 60000, "it cannot be used"),
    (TEXT[:-9], "it cannot be used"),
    (forged(profile=...), "'profile'"),
    (forged(circumstances=5), "it cannot be used"),
    (forged(profile={}), "it cannot be used"),
    (forged(profile={**json.loads(TEXT)["profile"], "iteration": float("nan")}), "iteration of a profile is nan"),
    (forged(intervals=[2, 3]), "do not go together"),
    (forged(intervals=[1.5, 3.0]), "it cannot be used"),
)
def test_an_invalid_cached_profile_is_reported(text, reason):
    found = from_json(text, HERE, 0.035)
    assert isinstance(found, Ignored) and reason in found.reason


def test_complete_and_missing_profiles_are_stored_as_numbers_of_the_same_types():
    numbers = to_numbers(PROFILE, HERE)
    assert from_numbers(numbers, HERE) == PROFILE
    shapes = [{name: type(value) for name, value in each.items()} for each in (numbers, to_numbers(None, HERE))]
    assert shapes[0] == shapes[1]
    assert set(shapes[0].values()) == {int, float}
    assert max(abs(value) for value in numbers.values() if isinstance(value, int)) < 2**63


@for_each(
    None,
    to_numbers(None, HERE),
    to_numbers(PROFILE, HERE) | {"iteration": float("nan")},
    to_numbers(PROFILE, HERE) | {"snapshots": 1.5},
    {name: value for name, value in to_numbers(PROFILE, HERE).items() if name != "stall"},
)
def test_invalid_numbers_in_a_profile_cache_are_ignored(numbers):
    assert from_numbers(numbers, HERE) is None
