"""Who takes part in a round, with which rank: pure functions, over all small cases."""

import itertools
from itertools import permutations

import pytest

from fastckpt_run.rendezvous.membership import (
    BEFORE_THE_FIRST,
    Node,
    NodeLimits,
    Round,
    assign_ranks,
    is_complete,
)

NOBODY = frozenset[str]()


def node(id: str, host: str = "h", address: str = "a") -> Node:
    return Node(id, host, address, {})


def subsets(items: list[Node]) -> list[list[Node]]:
    return [list(some) for count in range(len(items) + 1) for some in itertools.combinations(items, count)]


CASES = [
    (size, survivors, newcomers, most)
    for size in range(5)
    for survivors in subsets([node(f"old{rank}", f"h{rank}") for rank in range(size)])
    for newcomers in range(4)
    for most in range(1, 6)
    if survivors or newcomers
]


def test_survivors_keep_their_ranks_and_all_ranks_are_given_once_in_all_cases() -> None:
    for size, survivors, newcomers, most in CASES:
        last = Round(1, "r", tuple(node(f"old{rank}", f"h{rank}") for rank in range(size)))
        new = [node(f"new{number}", f"n{number}") for number in range(newcomers)]
        for present in ([*new, *survivors], [*survivors, *new]):
            found = assign_ranks(last, present, most)
            ids = [each.id for each in found]
            assert len(ids) == len(set(ids)) == min(most, len(present))
            stays = [each for each in survivors if last.ranks[each.id] < len(ids)]
            for each in stays[:most]:
                assert ids.index(each.id) == last.ranks[each.id], (last, present, most)
            # No survivor gives way to a newcomer.
            assert len({each.id for each in survivors} & set(ids)) == min(most, len(survivors))


def test_without_a_newcomer_the_highest_rank_fills_the_hole() -> None:
    last = Round(1, "r", tuple(node(f"n{rank}") for rank in range(4)))
    found = assign_ranks(last, [node("n0"), node("n2"), node("n3")], 4)
    assert [each.id for each in found] == ["n0", "n3", "n2"]


def test_a_newcomer_takes_the_hole() -> None:
    last = Round(1, "r", tuple(node(f"n{rank}") for rank in range(4)))
    found = assign_ranks(last, [node("a", "first"), node("n0"), node("n2"), node("n3")], 4)
    assert [each.id for each in found] == ["n0", "a", "n2", "n3"]


def test_agents_that_start_again_take_the_ranks_that_their_hosts_had() -> None:
    last = Round(1, "r", tuple(node(f"n{rank}", f"h{3 - rank}") for rank in range(3)))
    found = assign_ranks(last, [node("x", "h1"), node("y", "h3"), node("n1", "h2")], 3)
    assert [each.id for each in found] == ["y", "n1", "x"]


def test_an_agent_of_a_host_that_had_a_rank_comes_before_other_newcomers() -> None:
    last = Round(1, "r", (node("n0", "h0"), node("n1", "h1")))
    found = assign_ranks(last, [node("a", "other"), node("n0", "h0"), node("b", "h1")], 2)
    assert [each.id for each in found] == ["n0", "b"]


def test_a_first_round_goes_by_host_and_address_whoever_came_first() -> None:
    nodes = [node("z", "a", "1"), node("y", "a", "2"), node("x", "b", "0")]
    for present in permutations(nodes):
        assert assign_ranks(BEFORE_THE_FIRST, list(present), 3) == tuple(nodes)


@pytest.mark.parametrize(
    ("last", "present", "gone", "since", "complete"),
    [
        ("", "ab", "", 0.0, False),  # a first round waits for the last call
        ("", "ab", "", 30.0, True),
        ("", "abc", "", 0.0, True),  # or until all are there
        ("", "a", "", 99.0, False),  # but never goes with too few
        ("abc", "ab", "", 99.0, False),  # a later round waits for the living
        ("abc", "ab", "c", 0.0, True),
        ("abc", "abc", "", 0.0, True),
        ("abc", "a", "bc", 99.0, False),
        ("ab", "abx", "", 0.0, True),
        ("ab", "xy", "ab", 0.0, False),  # nobody is left of the last round: as in a first one
        ("ab", "xy", "ab", 30.0, True),
    ],
)
def test_a_round_is_complete(last: str, present: str, gone: str, since: float, complete: bool) -> None:
    round = Round(len(last), "r", tuple(map(node, last)))
    limits = NodeLimits(2, 3, 30.0)
    assert is_complete(round, list(map(node, present)), frozenset(gone), limits, since) == complete


def test_a_round_can_be_written_and_read() -> None:
    round = Round(3, "r", (Node("i", "h", "a", {"pid": 1}),), is_closed=True)
    assert Round.from_record(round.to_record()) == round


@pytest.mark.parametrize("damage", [{"nodes": 3}, {"nodes": [{"id": 1}]}, {"number": "x"}, {"name": None}])
def test_a_record_that_describes_no_round_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="it describes no"):
        Round.from_record(Round(1, "r", (node("n"),)).to_record() | damage)
