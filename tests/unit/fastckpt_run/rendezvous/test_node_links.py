"""Nodes that do not hear each other, over real stores: who leaves, who stays, and when one that has left comes back."""

import time

import pytest

from fastckpt_run.rendezvous.membership import left_out_of
from tests.unit.fastckpt_run.rendezvous.agents import PATIENCE, agents, in_thread, kill, meet, until
from tests.unit.fastckpt_run.rendezvous.test_host_drain import addresses, end, ended, hosts, on_hosts

__all__ = ["addresses"]
pytestmark = pytest.mark.usefixtures("addresses")


@pytest.mark.parametrize(
    ("drained", "here", "out"),
    [
        ({"a": ""}, "", "a"),
        ({"a": "b"}, "ab", "a"),
        ({"a": "b"}, "a", ""),  # the other one is gone
        ({"a": "b", "b": ""}, "ab", "b"),
        ({"b": "", "a": "b"}, "ab", "b"),
        ({"a": "b", "b": "a"}, "ab", "b"),
        ({"a": "b", "b": "c"}, "abc", "b"),  # a left for b's sake, which has left since
    ],
)
def test_a_host_is_left_out_as_long_as_there_is_the_one_that_it_does_not_reach(
    drained: dict[str, str], here: str, out: str
) -> None:
    assert left_out_of(drained, [*here]) == {*out}


def test_of_two_that_do_not_hear_each_other_one_waits_until_the_other_is_gone() -> None:
    with agents(1, 3) as job:
        nodes = on_hosts(job, "a", "b", "c")
        meet(nodes)
        first, *others = sorted(nodes, key=lambda node: node.round.ranks[node.id])
        links = first.links
        assert links.part() == "" and not links.unheard() and not first.num_nodes_waiting()
        one, two = others
        one.links.report([two.id, "nobody"], undo=False)
        two.links.report([one.id], undo=False)
        assert links.unheard() == [(1, 2), (2, 1)]
        two.links.report([one.id], undo=True)
        assert links.unheard() == [(1, 2)]
        assert links.part() == two._me.host  # of the higher rank
        ended(nodes)
        assert links.part() == ""  # it is left out already
        waits = in_thread(two.next_rendezvous)
        assert {info.world_size for info in meet([first, one])} == {2}
        assert first.round.drained == {two._me.host: one._me.host} and not links.unheard()
        until(lambda: first._records.waiting(first.round), "it waits")  # type: ignore[union-attr]
        time.sleep(1.0)
        assert not first.num_nodes_waiting() and not waits.done()
        kill(one)
        ended([first])
        assert {info.world_size for info in meet([first])} == {2}
        assert sorted(hosts(first)) == sorted([first._me.host, two._me.host])
        assert waits.result(PATIENCE).world_size == 2  # type: ignore[attr-defined]
        end(first)


def test_who_misses_most_others_leaves_and_the_job_keeps_the_nodes_that_it_needs() -> None:
    with agents(2, 3) as job:
        nodes = on_hosts(job, "a", "b", "c")
        meet(nodes)
        by_rank = sorted(nodes, key=lambda node: node.round.ranks[node.id])
        bad = by_rank[1]
        bad.links.report([node.id for node in nodes if node is not bad], undo=False)
        assert by_rank[0].links.part() == bad._me.host
        ended(nodes)
        waits = in_thread(bad.next_rendezvous)
        stay = [node for node in by_rank if node is not bad]
        meet(stay)
        until(lambda: stay[0]._records.waiting(stay[0].round), "it waits")  # type: ignore[union-attr]
        # Two are needed. Without the one for whose sake the third left, that comes back.
        stay[1].links.report([stay[0].id], undo=False)
        assert stay[0].links.part() == stay[0]._me.host
        ended(stay)
        out = in_thread(stay[0].next_rendezvous)
        meet(stay[1:])
        assert waits.result(PATIENCE).world_size == 2  # type: ignore[attr-defined]
        assert stay[1].round.drained == {stay[0]._me.host: stay[1]._me.host}
        end(bad, out)


def test_a_host_that_left_comes_back_rather_than_that_the_job_lacks_a_node() -> None:
    """And does not leave again when the other one is back, unless they still do not hear each other."""
    with agents(2, 2, spares=1, silence=0.5, last_call=0.5) as job:
        nodes = on_hosts(job, "a", "b", "c")
        spare = nodes.pop()
        meet(nodes)
        takes = in_thread(spare.next_rendezvous)
        until(lambda: nodes[0]._records.waiting(nodes[0].round), "the spare waits")  # type: ignore[union-attr]
        nodes[1].links.report([nodes[0].id], undo=False)
        assert nodes[0].links.part() == "b"
        ended(nodes)
        waits = in_thread(nodes[1].next_rendezvous)
        meet(nodes[:1])
        assert takes.result(PATIENCE).world_size == 2  # type: ignore[attr-defined]
        kill(spare)
        ended(nodes[:1])
        assert {info.world_size for info in meet(nodes[:1])} == {2} and not nodes[0].round.drained
        assert waits.result(PATIENCE).world_size == 2  # type: ignore[attr-defined]
        end(nodes[0])


def test_reports_outlive_the_store_and_those_of_lost_nodes_count_for_nothing() -> None:
    with agents(1, 3) as job:
        nodes = on_hosts(job, "a", "b", "c")
        meet(nodes)
        first, one, two = sorted(nodes, key=lambda node: node.round.ranks[node.id])
        one.links.report([two.id], undo=False)
        key = one._records._key(one.round.name, "apart")  # type: ignore[union-attr]
        one._records.connection.delete(key)  # type: ignore[union-attr]
        assert not first.links.unheard()
        one._announce(one._records, one.round)  # type: ignore[arg-type]
        assert not first.links.unheard(), "once to each store"
        one._announce(one._records.at(one._records.connection), one.round)  # type: ignore[union-attr]
        assert first.links.unheard() == [(1, 2)]
        kill(two)
        ended([first])
        until(lambda: two.id in first._records.gone(first.round), "it is reported")  # type: ignore[union-attr]
        assert first.links.part() == ""
        meet([first, one])
        end(first)


def test_a_job_that_waits_says_for_whom_and_where() -> None:
    with agents(2, 2) as job:
        nodes = on_hosts(job, "a", "b")
        place = nodes[0]._records.place  # type: ignore[union-attr]
        assert nodes[0].links.awaited() == f"0 of 2 nodes have come to {place}"
        meet(nodes)
        assert nodes[0].links.awaited() == ""
        nodes[0].lost([])
        nodes[0]._records.end(nodes[0].round)  # type: ignore[union-attr]
        comes = in_thread(nodes[0].next_rendezvous)
        until(lambda: nodes[0].links.awaited().startswith("1 of 2"), "it waits")
        assert nodes[0].links.awaited() == f"1 of 2 nodes have come to {place}, waiting for b"
        meet(nodes[1:])
        comes.result(PATIENCE)
        assert nodes[0].links.awaited() == ""
        end(nodes[0])
