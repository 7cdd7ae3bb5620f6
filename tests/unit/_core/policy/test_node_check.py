"""Verdicts of a node check: limits, pairs, and who is bad or slow, as tables and for random sets of bad nodes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.node_check import (
    FLOORS,
    CheckLimits,
    CheckResult,
    Verdict,
    first_pairs,
    judge,
    second_pairs,
)
from tests.support.tables import for_each

OK, PROBLEM, UNKNOWN = Verdict.OK, Verdict.PROBLEM, Verdict.UNKNOWN


def check(nodes, bad=(), slow=(), broken=(), rate=100.0):
    """The verdicts where exchanges with bad nodes and over broken links fail, and those with slow ones are slow."""

    def measured(pairs):
        def one(pair):
            if set(pair) & set(bad) or set(pair) in [set(link) for link in broken]:
                return None
            return rate / 10 if set(pair) & set(slow) else rate

        return {pair: one(pair) for pair in pairs}

    first = measured(first_pairs(nodes))
    return judge(nodes, first, measured(second_pairs(nodes, first)))


@for_each(
    (CheckLimits({"disk": 50.0}, {"disk /data": 400.0}), "disk /data", 50.0),
    (CheckLimits({"disk": 50.0, "disk /data": 7.0}, {}), "disk /data", 7.0),
    (CheckLimits({}, {"disk /data": 400.0}), "disk /data", 200.0),
    (CheckLimits({}, {"disk /data": 400.0}, 0.75), "disk /data", 300.0),
    (CheckLimits({}, {"shm": 4000.0}), "shm", FLOORS["shm"]),
    (CheckLimits({}, {"matmul cuda:0": 1e4}), "matmul cuda:1", FLOORS["matmul"]),
    (CheckLimits({}, {}), "devices", None),
)
def test_a_limit_is_what_is_given_else_a_share_of_the_baseline_else_the_floor(limits, name, limit):
    assert limits.of(name) == limit


def test_what_has_a_limit_and_was_not_checked_is_not_passed_over():
    made = [CheckResult("matmul cuda:0 float32", OK), CheckResult("disk /data", OK)]
    good = {"matmul cuda:0 float32": 9.0, "matmul cuda:1 float32": 9.0, "disk /other": 5.0, "shm": 7.0, "memory": 2.0}
    limits = CheckLimits({"disk": 1.0, "disk /third": 1.0, "matmul cuda:2 float32": 1.0}, good)
    found = {each.name: each.verdict for each in limits.missing(made, ("disk", "matmul"))}
    assert found == {
        "disk /third": UNKNOWN,
        "matmul cuda:2 float32": PROBLEM,
        "matmul cuda:1 float32": PROBLEM,
        "disk /other": UNKNOWN,
    }
    assert limits.missing(made, ("loopback",)) == []


def test_a_value_below_its_limit_is_a_problem_that_names_both():
    limits = CheckLimits({"disk": 50.0}, {})
    low = limits.apply(CheckResult("disk /data", OK, value=49.94, unit="MB/s"))
    assert (low.verdict, low.message, low.limit) == (PROBLEM, "49.9 MB/s, less than 50", 50.0)
    assert limits.apply(CheckResult("disk /data", OK, value=50.0, unit="MB/s")).verdict is OK
    unknown = CheckResult("disk /data", UNKNOWN, "no process")
    assert limits.apply(unknown) == unknown
    wrong = CheckResult("disk /data", PROBLEM, "does not keep bytes", value=1.0)
    assert limits.apply(wrong).message == "does not keep bytes"


TABLE = [
    # nodes, what is wrong, verdicts that are not ok
    (1, {}, {}),
    (5, {}, {}),
    (2, {"bad": [1]}, {0: UNKNOWN, 1: UNKNOWN}),  # whose fault it is cannot be told
    (3, {"bad": [0, 1]}, {0: UNKNOWN, 1: UNKNOWN, 2: UNKNOWN}),
    (4, {"bad": [0, 1]}, {0: PROBLEM, 1: PROBLEM}),
    (4, {"bad": [0, 2]}, dict.fromkeys(range(4), UNKNOWN)),  # nobody was good in the first round
    (8, {"bad": [1, 3, 5]}, {1: PROBLEM, 3: PROBLEM, 5: PROBLEM}),
    (4, {"broken": [(0, 1)]}, {0: UNKNOWN, 1: UNKNOWN}),  # both are good with others: the link
    (4, {"broken": [(0, 2)]}, {0: UNKNOWN, 2: UNKNOWN}),  # found in the second round
]


@for_each(*TABLE)
def test_verdicts_of_both_rounds(count, wrong, expected):
    found = check(list(range(count)), **wrong)
    assert {node: each.verdict for node, each in found.items() if each.verdict is not OK} == expected


@for_each((2, {0}), (3, {2}), (4, {0}), (7, {6}), (8, {1, 4}))
def test_slow_nodes_are_told_from_their_partners(count, slow):
    """Of two neither is, for both measure the same."""
    found = check(list(range(count)), slow=slow)
    assert {node for node, each in found.items() if each.is_slow} == (slow if count > 2 else set())
    assert all(each.verdict is OK for each in found.values())


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.data())
def test_no_good_node_is_called_bad_and_no_bad_one_good_and_links_make_none_bad_that_another_has_reached(count, data):
    nodes = list(range(count))
    bad = data.draw(st.sets(st.sampled_from(nodes)))
    found = check(nodes, bad=bad)
    assert all(each.verdict is not (OK if node in bad else PROBLEM) for node, each in found.items())
    met = [pair for pair in first_pairs(nodes) if not set(pair) & bad]
    if met and len(bad) <= count // 4:  # good nodes take several suspects each
        assert all(found[node].verdict is PROBLEM for node in bad)
    links = st.tuples(st.sampled_from(nodes), st.sampled_from(nodes))
    found = check(nodes, broken=data.draw(st.sets(links, max_size=20)))
    assert all(each.rate is None for each in found.values() if each.verdict is PROBLEM)


@for_each({"verdict": "fine"}, {"name": 1}, {"message": 1}, {"value": "fast"}, {"more": 1})
def test_what_is_no_result_is_refused(wrong):
    for record in (None, {"name": "a"}, {"name": "a", "verdict": "ok"} | wrong):
        with pytest.raises(ValueError):
            CheckResult.from_record(record)
