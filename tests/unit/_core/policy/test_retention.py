"""Retention: as a table, and what holds whatever is saved and whenever it is decided."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.retention import (
    DEEPEST,
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepEveryMinutes,
    KeepLast,
    KeepMeasured,
    KeepNamed,
    RetentionEntry,
    from_json,
    measured,
    to_json,
)
from fastckpt.errors import ConfigError, ProtocolError
from tests.support.tables import for_each

IDS = [(0, 10), (0, 20), (0, 30), (1, 15), (1, 25)]


def entries(*ids: tuple[int, int]) -> list[RetentionEntry]:
    return [RetentionEntry(id) for id in ids]


def at(*minutes: float) -> list[RetentionEntry]:
    """Steps 1, 2, ... of one history, persisted at these minutes of the clock."""
    return [RetentionEntry((0, step), 60 * minute) for step, minute in enumerate(minutes, 1)]


def of(metric: str, *values: float | None) -> list[RetentionEntry]:
    """Steps 1, 2, ... with these values of a metric."""
    return [RetentionEntry((0, i), 0, {} if value is None else {metric: value}) for i, value in enumerate(values, 1)]


MINUTES = KeepEveryMinutes(10)


@for_each(
    (KeepAll(), [], []),
    (KeepLast(1), entries(*IDS), [(1, 25)]),
    (KeepLast(3), entries(*IDS), [(0, 30), (1, 15), (1, 25)]),  # a newer history's smaller step is the newer
    (KeepEvery(10), entries(*IDS), [(0, 10), (0, 20), (0, 30), (1, 25)]),
    (KeepEvery(7), entries(*IDS), [(1, 25)]),
    (KeepAny((KeepAny((KeepLast(1),)), KeepAny((KeepEvery(20),)))), entries(*IDS), [(0, 20), (1, 25)]),
    ("the first of each period, and the newest", MINUTES, at(0, 3, 6, 9, 12, 15, 18, 21, 24), [1, 5, 8, 9]),
    ("every tenth second, somewhat late and early", MINUTES, at(5, 15.01, 24.99, 35.02, 44.98), [1, 2, 3, 4, 5]),
    ("set back by an hour", MINUTES, at(101, 102, 43, 44, 51, 52), [1, 3, 5, 6]),
    ("set back a little, to the period before", MINUTES, at(15, 6, 8, 12, 13), [1, 2, 4, 5]),
    ("a clock that stands still", MINUTES, at(5, 5, 5, 5), [1, 4]),
    ("before there were clocks", MINUTES, at(0, 0, 30_000_000), [1, 3]),
    (KeepBest(1, "loss"), of("loss", 3, 1, 2), [2, 3]),
    (KeepBest(1, "loss", "max"), of("loss", 3, 1, 2), [1, 3]),
    (KeepBest(2, "loss"), of("loss", 3, 1, 2, 9), [2, 3, 4]),
    (KeepBest(1, "loss"), of("loss", 1, 1, 1, 2), [3, 4]),  # of equals the newer
    (KeepBest(2, "loss"), of("loss", None, 5, None, 4, None), [2, 4, 5]),
    (KeepBest(2, "loss"), of("loss", math.nan, 5, math.inf, 6, -math.inf, 7), [2, 4, 6]),
    (KeepMeasured("loss"), of("loss", None, 5, None, math.nan, 0, None), [2, 5, 6]),
    (KeepMeasured("epoch"), of("loss", 1, 2), [2]),
    (KeepNamed(2, "best"), of("best", 1, 2, 2, 2), [2, 4]),
    (KeepNamed(2, "best"), of("best", None, None, None, None), [3, 4]),
    (KeepNamed(2, "best"), of("best", 1, None, 99, 99), [3, 4]),  # what is named is not there
    (KeepNamed(2, "best"), [], []),
)
def test_policies_keep_by_number_time_and_metric_in_whatever_order_checkpoints_are_listed(policy, entries, kept):
    expected = {id if isinstance(id, tuple) else (0, id) for id in kept}
    assert policy(entries) == policy(entries[::-1]) == expected


policies = st.recursive(
    st.one_of(
        st.just(KeepAll()),
        st.builds(KeepLast, st.integers(1, 9)),
        st.builds(KeepEvery, st.integers(1, 9)),
        st.builds(KeepEveryMinutes, st.sampled_from([0.01, 1, 2.5, 10, 60])),
        st.builds(KeepMeasured, st.sampled_from(["loss", "accuracy"])),
        st.builds(KeepBest, st.integers(1, 4), st.sampled_from(["loss", "accuracy"]), st.sampled_from(["min", "max"])),
    ),
    lambda inner: st.builds(lambda parts: KeepAny(tuple(parts)), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=4,
)
times = st.floats(0, 2e9, width=32) | st.integers(0, 40).map(lambda minutes: 60.0 * minutes)
metrics = st.dictionaries(st.sampled_from(["loss", "accuracy", "other"]), st.integers(-3, 3) | st.floats(), max_size=3)
ids = st.tuples(st.integers(0, 3), st.integers(0, 30))
saved = st.lists(st.builds(RetentionEntry, ids, times, metrics), unique_by=lambda entry: entry.id, max_size=25)


@settings(max_examples=25)
@given(policies, saved, st.data())
def test_every_policy_keeps_the_newest_and_decides_alike_after_earlier_deletions(policy, entries, data):
    """Whichever of those not kept are gone already, say by a crash amid deletion, the decision is the same."""
    kept, all_ids = policy(entries), {entry.id for entry in entries}
    assert kept <= all_ids and policy(entries[::-1]) == kept
    assert not entries or max(all_ids) in kept
    left = kept | data.draw(st.sets(st.sampled_from(sorted(all_ids)))) if entries else kept
    assert policy([entry for entry in entries if entry.id in left]) == kept


@settings(max_examples=15)
@given(policies | st.builds(KeepNamed, st.integers(1, 9), st.sampled_from(["best", "other"])))
def test_retention_policies_survive_a_round_trip_as_json(policy):
    assert from_json(to_json(policy)) == policy


@for_each(
    *("last", [], {"keep": "last"}, {"keep": "every", "n": 3}, {"keep": "all", "n": 3}, {"keep": []}),
    *({"keep": "last", "n": n} for n in (0, True, "3")),
    *({"keep": "minutes", "minutes": n} for n in (0, True, "3", math.nan)),
    *({"keep": "any", "of": of} for of in ([], None, [3], [{"keep": "last"}])),
    {"keep": "any", "of": [{"keep": "all"}], "n": 1},
    *({"keep": "best", "n": 1, "metric": metric, "mode": "min"} for metric in ("", [])),
    *({"keep": "measured", "metric": metric} for metric in ("", 3)),
    *({"keep": "best", "n": 1, "metric": "loss", "mode": mode} for mode in ("least", [])),
)
def test_json_that_is_no_retention_policy_is_refused(value):
    with pytest.raises(ProtocolError, match="retention policy"):
        from_json(value)


@for_each(0, 1.5, True, "2")
def test_a_policy_that_keeps_no_checkpoint_is_refused(value):
    for make in (KeepLast, KeepEvery, lambda n: KeepBest(n, "loss"), lambda n: KeepNamed(n, "best")):
        with pytest.raises(ConfigError, match="1 or more"):
            make(value)
    with pytest.raises(ConfigError, match="at least one"):
        KeepAny(())


@for_each(
    ({"loss": 1.5, "epoch": 3}, {"loss": 1.5, "epoch": 3}),
    ({"large": 10**400, "least": -(10**400), "most": 10**300}, {"most": 1e300}),
    ({"loss": math.nan, "a": "1", "b": True, "c": None, "d": [1], "e": math.inf, "f": -0.0}, {"f": 0.0}),
    (None, {}),
    ([["loss", 1.0]], {}),
)
def test_invalid_metrics_in_a_manifest_are_ignored(found, usable):
    assert measured(found) == usable


def nested(depth: int) -> object:
    value: object = {"keep": "last", "n": 1}
    for _ in range(depth):
        value = {"keep": "any", "of": [value]}
    return value


def test_json_of_nested_unions_is_refused_beyond_a_depth():
    assert from_json(nested(DEEPEST))([RetentionEntry((0, 1))]) == {(0, 1)}
    with pytest.raises(ProtocolError, match=f"deeper than {DEEPEST}"):
        from_json(nested(DEEPEST + 1))
