"""Lines of training: as a table, and that retention in one never asks what another has."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.lineage import heads, kept, lines, merged, passed_over, past
from fastckpt._core.policy.retention import KeepBest, KeepEvery, KeepLast, RetentionEntry
from tests.support.tables import for_each


def entry(history: int, step: int, *before: int, loss: float = 0.0) -> RetentionEntry:
    """A checkpoint of a history that came through those."""
    return RetentionEntry((history, step), 0.0, {"loss": loss}, merged((each, each) for each in before))


def test_a_policy_decides_for_each_line_of_training_separately():
    old = [entry(1, step, loss=1.0 / step) for step in range(100, 106)]
    new = [entry(2, step, loss=9.0) for step in range(4)]
    assert kept(KeepLast(2), old + new) == {(1, 104), (1, 105), (2, 2), (2, 3)}
    assert kept(KeepEvery(100), old + new) == {(1, 100), (1, 105), (2, 0), (2, 3)}
    assert kept(KeepBest(1, "loss"), old + new) == {(1, 105), (2, 3)}
    assert heads(old + new) == [(2, 3), (1, 105)]


def test_what_a_resume_passed_over_is_kept_and_counts_for_no_policy():
    before, bad = [entry(1, 1), entry(1, 2)], [entry(1, 3), entry(1, 4)]  # 3 and 4 did not load: 2 was resumed
    after = [entry(2, step, 1)._replace(passed_over=frozenset([(1, 3), (1, 4), (1, 9)])) for step in (3, 4, 5)]
    assert kept(KeepLast(2), before + bad + after) == {(1, 3), (1, 4), (2, 4), (2, 5)}
    assert kept(KeepLast(2), before + bad + after[:1]) == {(1, 2), (1, 3), (1, 4), (2, 3)}
    assert kept(KeepEvery(2), before + bad + after) == {(1, 2), (1, 3), (1, 4), (2, 4), (2, 5)}
    assert kept(KeepLast(2), before + bad) == {(1, 3), (1, 4)}  # nothing has passed them over yet


@for_each(([[1, 3], [2, 4]], {(1, 3), (2, 4)}), ([[1], "x", 5], set()), ("nonsense", set()), (7, set()))
def test_what_was_passed_over_comes_from_the_details(said, expected):
    assert passed_over({"passed_over": said}) == expected and not passed_over({})


@for_each(
    ({}, None, ()),
    ({}, (3, 7), ((3, 3),)),
    ({"histories": [[1, 3], [5, 5]]}, (5, 7), ((1, 3), (5, 5))),
    ({"histories": [[1], "x", [1, "2"], [4, 4]]}, None, ((4, 4),)),
    ({"histories": "nonsense"}, (5, 7), ((5, 5),)),
)
def test_the_past_of_a_history_comes_from_its_details_or_parent(details, parent, expected):
    assert past(details, parent) == expected


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 3), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)))),
        max_size=12,
    )
)
def test_a_line_is_the_newest_history_and_all_that_it_came_through_by_any_way(rows):
    entries = [
        RetentionEntry((history, step), past=merged((first, first + more) for first, more in runs))
        for history, step, runs in rows
    ]
    pasts = {one.id[0]: [run for each in entries if each.id[0] == one.id[0] for run in each.past] for one in entries}
    left, expected = set(pasts), []
    while left:
        line, before = set(), {max(left)}
        while before - line:
            line |= before
            before = {each for each in pasts for one in line for first, last in pasts[one] if first <= each <= last}
        expected.append([each for each in entries if each.id[0] in line & left])
        left -= line
    assert lines(entries) == expected
