"""A cache is believed only if nothing about it is amiss: tables, and every single change of a character."""

import json
import random
from dataclasses import replace
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.frequency.intervals import Intervals, Profile, choose
from fastckpt._core.policy.frequency.profile_cache import (
    LARGEST,
    Ignored,
    ProfileKey,
    Remembered,
    from_json,
    from_numbers,
    key,
    to_json,
    to_numbers,
)
from fastckpt._core.policy.frequency.profiling import ProfilingProgress

HERE = ProfileKey(10**9, 8, "ext4", "cpu", {"fastckpt": "0.1.0", "torch": "2.13.0"})
PROFILE = Profile(1.0, 0.1, 0.95, 3.0, 10**9, device_copy=0.1, peak=5, capacity=10)
KNOWN = Remembered(PROFILE, choose(PROFILE, 0.035), Intervals(4, 16))
TEXT = to_json(KNOWN, HERE, 0.035)


def test_what_was_kept_is_found_again():
    assert from_json(TEXT, HERE, 0.035) == KNOWN
    untuned = replace(KNOWN, intervals=None)
    assert from_json(to_json(untuned, HERE, 0.035), HERE, 0.035) == untuned


def test_another_overhead_makes_another_choice_of_the_same_profile():
    assert from_json(TEXT, HERE, 0.01) == Remembered(PROFILE, choose(PROFILE, 0.01))


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", 1), ("world_size", 4), ("storage", "nfs"), ("device", "NVIDIA H200"), ("versions", {"torch": "3"})],
)
def test_other_circumstances_have_other_names_and_caches(name, value):
    elsewhere = replace(HERE, **{name: value})
    assert key(elsewhere) != key(HERE)
    assert from_json(TEXT, elsewhere, 0.035) == Ignored(f"it is of other circumstances: {name}")


def test_a_key_is_a_name_for_a_file_and_depends_on_nothing_else():
    assert len(key(HERE)) == 16 and PurePosixPath(key(HERE)).name == key(HERE)
    assert key(HERE) == key(replace(HERE, versions=dict(reversed(list(HERE.versions.items())))))


def test_no_character_can_change_unnoticed():
    rng = random.Random(2)
    for at in range(len(TEXT)):
        damaged = TEXT[:at] + rng.choice('0123456789abcdef{}",: ') + TEXT[at + 1 :]
        found = from_json(damaged, HERE, 0.035)
        assert isinstance(found, Ignored) or found == KNOWN
        assert isinstance(from_json(TEXT[:at], HERE, 0.035), Ignored)


def forged(**changes):
    """A cache with other content and a digest that fits."""
    from fastckpt._core.policy.frequency.profile_cache import _digest

    content = {name: value for name, value in json.loads(TEXT).items() if name != "digest"} | changes
    content = {name: value for name, value in content.items() if value is not ...}
    return json.dumps({**content, "digest": _digest(content)})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is no JSON"),
        ("[]", "it is a list, no object"),
        ("null", "it is a NoneType"),
        ("[" * 60000, "it is no JSON"),
        ("x" * (LARGEST + 1), f"it has {LARGEST + 1} characters"),
        ('{"format": 2}', "its format is 2; this version reads 1"),
        ('{"format": 1}', "it is damaged"),
        (forged(profile=...), "it has no profile"),
        (forged(circumstances=5), "it is of other circumstances"),
        (forged(profile=5), "it cannot be used"),
        (forged(profile={}), "it cannot be used"),
        (forged(profile={**json.loads(TEXT)["profile"], "iteration": float("nan")}), "iteration of a profile is nan"),
        (forged(profile={**json.loads(TEXT)["profile"], "iteration": "1"}), "it cannot be used"),
        (forged(profile={**json.loads(TEXT)["profile"], "iteration": 2}), "choice does not follow from its profile"),
        (forged(choice={}), "choice does not follow from its profile"),
        (forged(intervals=[2, 3]), "do not go together"),
        (forged(intervals=[1.5, 3.0]), "it cannot be used"),
        (forged(intervals=[4]), "it cannot be used"),
        (forged(intervals=7), "it cannot be used"),
    ],
)
def test_what_is_amiss_is_told(text, reason):
    found = from_json(text, HERE, 0.035)
    assert isinstance(found, Ignored) and reason in found.reason


ANY = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(ANY)
@settings(max_examples=60, deadline=None)
def test_any_json_is_read_without_an_error(value):
    assert isinstance(from_json(json.dumps(value), HERE, 0.035), Ignored)
    assert isinstance(from_json(forged(profile=value, choice=value), HERE, 0.035), Ignored)
    assert isinstance(from_json(forged(circumstances=value), HERE, 0.035), Ignored)


PROGRESS = ProfilingProgress(PROFILE, iterations=20, snapshots=7, persists=1, plain=9)


@pytest.mark.parametrize("progress", [PROGRESS, replace(PROGRESS, profile=replace(PROFILE, device_copy=None))])
def test_a_profile_that_is_not_complete_is_kept_as_numbers_of_the_same_types_as_none(progress):
    numbers = to_numbers(progress, HERE)
    assert from_numbers(numbers, HERE) == progress
    shapes = [{name: type(value) for name, value in each.items()} for each in (numbers, to_numbers(None, HERE))]
    assert shapes[0] == shapes[1]
    assert set(shapes[0].values()) == {int, float}
    assert max(abs(value) for value in numbers.values() if isinstance(value, int)) < 2**63


@pytest.mark.parametrize(
    "numbers",
    [
        None,
        {},
        7,
        to_numbers(None, HERE),
        to_numbers(PROGRESS, replace(HERE, world_size=2)),
        to_numbers(PROGRESS, HERE) | {"iteration": float("nan")},
        to_numbers(PROGRESS, HERE) | {"iteration": "x"},
        to_numbers(PROGRESS, HERE) | {"snapshots": 1.5},
        {name: value for name, value in to_numbers(PROGRESS, HERE).items() if name != "update"},
    ],
)
def test_numbers_that_are_amiss_are_none(numbers):
    assert from_numbers(numbers, HERE) is None


def test_what_was_kept_before_copies_were_compared_counts():
    profile = {name: value for name, value in json.loads(TEXT)["profile"].items() if name != "copy_slowdown"}
    assert from_json(forged(profile=profile), HERE, 0.035) == KNOWN
