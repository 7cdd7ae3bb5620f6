"""Retention, as a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastckpt.errors import ConfigError, ProtocolError
from fastckpt.policy.retention import KeepAll, KeepEvery, KeepLast, from_json, to_json

IDS = [(0, 10), (0, 20), (0, 30), (1, 15), (1, 25)]


@pytest.mark.parametrize(
    ("policy", "ids", "kept"),
    [
        (KeepAll(), IDS, IDS),
        (KeepAll(), [], []),
        (KeepLast(1), IDS, [(1, 25)]),
        (KeepLast(3), IDS, [(0, 30), (1, 15), (1, 25)]),  # a newer history's smaller step is the newer
        (KeepLast(9), IDS, IDS),
        (KeepLast(2), [], []),
        (KeepLast(2), [(0, 1), (0, 1), (0, 2)], [(0, 1), (0, 2)]),
        (KeepEvery(10), IDS, [(0, 10), (0, 20), (0, 30), (1, 25)]),
        (KeepEvery(15), IDS, [(0, 30), (1, 15), (1, 25)]),
        (KeepEvery(7), IDS, [(1, 25)]),
        (KeepEvery(7), [(0, 0), (0, 1)], [(0, 0), (0, 1)]),
        (KeepEvery(1), IDS, IDS),
        (KeepEvery(5), [], []),
    ],
)
def test_keeps(policy, ids, kept):
    assert policy(ids) == frozenset(kept)
    assert policy(list(reversed(ids))) == frozenset(kept)


policies = st.one_of(
    st.just(KeepAll()), st.builds(KeepLast, st.integers(1, 9)), st.builds(KeepEvery, st.integers(1, 9))
)


@given(policies, st.sets(st.tuples(st.integers(0, 3), st.integers(0, 30))))
def test_the_newest_is_always_kept_and_applying_twice_changes_nothing(policy, ids):
    kept = policy(ids)
    assert kept <= ids
    assert not ids or max(ids) in kept
    assert policy(kept) == kept


@given(policies)
def test_json_both_ways(policy):
    assert from_json(to_json(policy)) == policy


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, "last", [], {}, {"keep": "last"}, {"keep": "every", "n": 3}, {"keep": "all", "n": 3}, {"keep": []}),
        *({"keep": "last", "n": n} for n in (0, True, "3", None)),
    ],
)
def test_refuses_json_that_is_no_policy(value):
    with pytest.raises(ProtocolError, match="retention policy"):
        from_json(value)


@pytest.mark.parametrize("make", [KeepLast, KeepEvery])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_refuses_numbers_that_keep_nothing(make, value):
    with pytest.raises(ConfigError, match="1 or more"):
        make(value)
