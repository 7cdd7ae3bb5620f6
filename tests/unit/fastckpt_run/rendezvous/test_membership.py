"""Who takes part in a round, with which rank: pure functions, over all small cases."""

import itertools
import json

import pytest

from fastckpt_run.rendezvous.job_terms import JobTerms
from fastckpt_run.rendezvous.membership import (
    BEFORE_THE_FIRST,
    Node,
    NodeLimits,
    Round,
    assign_ranks,
    collect_faults,
    fitting,
    is_complete,
    leave_out,
    terms_of,
)
from tests.support.tables import for_each

NOBODY = frozenset[str]()


def node(id: str, host: str = "h", address: str = "a", domain: str = "") -> Node:
    return Node(id, host, address, {}, domain=domain)


def test_survivors_keep_their_ranks_and_all_ranks_are_given_once_in_all_cases():
    for size, newcomers, most in itertools.product(range(5), range(4), range(1, 6)):
        last = Round(1, "r", tuple(node(f"old{rank}", f"h{rank}") for rank in range(size)))
        new = [node(f"new{number}", f"n{number}") for number in range(newcomers)]
        for survivors in ([*some] for count in range(size + 1) for some in itertools.combinations(last.nodes, count)):
            for present in ([*new, *survivors], [*survivors, *new]):
                ids = [each.id for each in assign_ranks(last, present, most)]
                assert len(ids) == len(set(ids)) == min(most, len(present))
                stays = [each for each in survivors if last.ranks[each.id] < len(ids)]
                for each in stays[:most]:
                    assert ids.index(each.id) == last.ranks[each.id], (last, present, most)
                # No survivor gives way to a newcomer.
                assert len({each.id for each in survivors} & set(ids)) == min(most, len(survivors))


RACKS = "a:a:x:r1 b:b:x:r1 c:c:x:r2 d:d:x:r2"


def some(text: str) -> list[Node]:
    """Nodes by their ids, hosts, addresses and domains."""
    return [node(*one.split(":")) for one in text.split()]


@for_each(
    ("n0 n1 n2 n3", "n0 n2 n3", "n0 n3 n2"),  # the highest rank fills the hole
    ("n0 n1 n2 n3", "a:first n0 n2 n3", "n0 a n2 n3"),  # a newcomer does
    # a host that comes back with another address; of hosts of one name the one that has the address goes first
    ("n0:h0:0 n1:h1:1 n2:h2:2", "y:h4 x:h2:9 n0:h0:0", "n0 y x"),
    ("n0:h:0 n1:h:1", "x:h:9 y:h:0", "y x"),
    ("n0:h3 n1:h2 n2:h1", "x:h1 y:h3 n1:h2", "y n1 x"),  # agents that start again
    ("n0:h0 n1:h1", "a:other n0:h0 b:h1", "n0 b"),  # before other newcomers
    # a first round goes by domain, then host and address
    ("", "x:b:0 y:a:2 z:a:1", "z y x"),
    ("", "a:a:x:r3 y:y:x:r2 b:b:x:r2 z:z:x:r1", "z b y a"),
    # a newcomer of the domain that has lost a host comes before others, and takes its rank; that host before it
    (RACKS, "e:e:x:r1 a:a:x:r1 b:b:x:r1 d:d:x:r2 f:f:x:r2", "a b f d"),
    (RACKS, "e:e:x:r1 f:f:x:r2 a:a:x:r1 b:b:x:r1 d:d:x:r2 g:c:x:r9", "a b g d"),
    (RACKS, "b:b:x:r1 d:d:x:r2 f:f:x:r2 e:e:x:r1", "e b f d"),
)
def test_ranks_go_to_the_nodes_and_hosts_that_had_them(last, present, expected):
    found = assign_ranks(Round(1, "r", tuple(some(last))), some(present), len(last.split()) or 4)
    assert [each.id for each in found] == expected.split()


@for_each(
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
)
def test_a_round_is_complete(last, present, gone, since, complete):
    round = Round(len(last), "r", tuple(map(node, last)))
    limits = NodeLimits(2, 3, 30.0)
    assert is_complete(round, list(map(node, present)), frozenset(gone), limits, since) == complete


def test_a_round_can_be_written_and_read_and_a_record_that_describes_none_is_refused():
    node = Node("i", "h", "a", {"pid": 1}, "signal 9", is_checked=True, terms=JobTerms("0.6.0"))
    faults = {"h": ("signal 9", "lost in round 2")}
    round = Round(
        3, "r", (node,), is_closed=True, faults=faults, terms=JobTerms(torch="2.13.0"), drained={"b": "", "a": "c"}
    )
    assert Round.from_record(json.loads(json.dumps(round.to_record()))) == round
    # Earlier versions know of no faults and terms; those that are none are not known.
    earlier = {"number": 1, "name": "r", "nodes": [{"id": "i", "host": "h", "address": "a", "process": {}}]}
    for terms in ({}, *({"terms": terms} for terms in (None, 3, [], "x", {"version": 6}, {"unheard of": "x"}))):
        found = Round.from_record(earlier | {"is_closed": False} | terms)
        assert found == Round(1, "r", (Node("i", "h", "a", {}),))
    lies: list[dict[str, object]] = [{"nodes": 3}, {"nodes": [{"id": 1}]}, {"number": "x"}, {"name": None}]
    for damage in [*lies, {"faults": {"h": 3}}, {"drained": 3}]:
        with pytest.raises(ValueError, match="it describes no"):
            Round.from_record(round.to_record() | damage)


def fits(id: str, version: str) -> Node:
    return node(id)._replace(terms=JobTerms(version, replicas="1"))


def test_where_a_member_is_left_others_have_to_fit_what_its_nodes_have_in_common_and_had_before():
    last = Round(1, "r", (node("a"), node("b")), terms=JobTerms("1", replicas="1"))
    for present, expected in (
        ("a1 b1 c1", "a b c"),
        ("x2 a1 b1", "a b"),  # also where it came first
        ("x2 y1", "x y"),  # nobody is left of the last round: they meet as for a first one
        ("x2 a2", "a"),  # a member is one
    ):
        assert [each.id for each in fitting(last, [fits(*text) for text in present.split()])] == expected.split()
    first = terms_of(BEFORE_THE_FIRST, [fits("a", "1"), fits("b", "2")])
    assert first == JobTerms(replicas="1")
    last = Round(1, "r", (node("a"), node("b")), terms=first)
    assert terms_of(last, [fits("a", "1")]) == first, "it has had an unlike one beside it"
    assert terms_of(last, [fits("c", "1")]) == JobTerms("1", replicas="1"), "nobody is left of them"


SPARES = NodeLimits(2, 3, spares=1, exclude_after=2)
LAST = Round(5, "r", tuple(node(f"n{rank}", f"h{rank}") for rank in range(3)), faults={"h1": ("signal 9",)})


def test_faults_are_those_of_nodes_that_came_or_are_gone_and_a_checked_fresh_agent_clears_its_host():
    came = [node("n0", "h0"), node("n1", "h1")._replace(fault="signal 9"), node("new", "h3")._replace(fault="ignored")]
    found = collect_faults(LAST, came, {"n1", "n2", "of an earlier round"})
    assert found == {"h1": ("signal 9", "signal 9"), "h2": ("lost in round 5",)}
    fresh = node("new", "h1")._replace(is_checked=True)
    assert collect_faults(LAST, [fresh], ()) == {}
    assert collect_faults(LAST, [fresh._replace(is_checked=False)], ()) == LAST.faults
    member = node("n1", "h1")._replace(is_checked=True)
    assert collect_faults(LAST, [member], ()) == LAST.faults, "one that was in the round was not checked since"


def test_a_suspected_host_is_left_out_only_while_another_waits():
    faults = {"h1": ("a", "b")}
    three, spare = [*LAST.nodes], node("new", "h3")
    assert leave_out(LAST, three, faults, SPARES) == ([three[0], three[2], three[1]], [])
    chosen, left = leave_out(LAST, [*three, spare], faults, SPARES)
    assert ({each.id for each in chosen}, left) == ({"n0", "n2", "new"}, [three[1]])
    assert [each.id for each in assign_ranks(LAST, chosen, 3)] == ["n0", "new", "n2"]
    waits = node("old", "h3")  # suspected, too: the member is needed before it
    chosen, left = leave_out(LAST, [waits, *three], faults | {"h3": ("c", "d")}, SPARES)
    assert ({each.id for each in chosen}, left) == ({"n0", "n1", "n2"}, [waits])
    for limits in (NodeLimits(2, 3, exclude_after=2), NodeLimits(2, 3, spares=1)):
        assert leave_out(LAST, [*three, spare], faults, limits) == ([*three, spare], [])
