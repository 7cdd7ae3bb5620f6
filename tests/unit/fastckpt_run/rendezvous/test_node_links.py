"""Nodes that do not hear each other, over real stores: who leaves, who stays, and when one that has left comes back."""

import pytest

from fastckpt_run.rendezvous.membership import left_out_of
from tests.unit.fastckpt_run.rendezvous.agents import PATIENCE, agents, by_rank, ended, in_thread, kill, meet, until
from tests.unit.fastckpt_run.rendezvous.test_host_drain import addresses, end, hosts, on_hosts, waits_for_a_place

__all__ = ["addresses"]
pytestmark = pytest.mark.usefixtures("addresses")


def test_a_host_is_left_out_as_long_as_there_is_the_one_that_it_does_not_reach():
    for drained, here, out in (
        ({"a": ""}, "", "a"),
        ({"a": "b"}, "ab", "a"),
        ({"a": "b"}, "a", ""),  # the other one is gone
        ({"a": "b", "b": ""}, "ab", "b"),
        ({"b": "", "a": "b"}, "ab", "b"),
        ({"a": "b", "b": "a"}, "ab", "b"),
        ({"a": "b", "b": "c"}, "abc", "b"),  # a left for b's sake, which has left since
    ):
        assert left_out_of(drained, [*here]) == {*out}


def test_of_two_that_do_not_hear_each_other_one_waits_until_the_other_is_gone():
    with on_hosts("abc") as (_, nodes):
        first, one, two = by_rank(nodes)
        links = first.links
        assert links.part() == "" and not links.unheard() and not first.num_nodes_waiting()
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
        until(lambda: first._records.waiting(first.round), "it waits")
        assert not first.num_nodes_waiting() and not waits.done()
        kill(one)
        ended([first])
        assert {info.world_size for info in meet([first])} == {2}
        assert sorted(hosts(first)) == sorted([first._me.host, two._me.host])
        assert waits.result(PATIENCE).world_size == 2
        end(first)


def test_who_misses_most_others_leaves_and_the_job_keeps_the_nodes_that_it_needs():
    with on_hosts("abc", 2) as (_, nodes):
        one, bad, other = by_rank(nodes)
        stay = [one, other]
        bad.links.report([node.id for node in stay], undo=False)
        assert one.links.part() == bad._me.host
        ended(nodes)
        waits = in_thread(bad.next_rendezvous)
        meet(stay)
        until(lambda: stay[0]._records.waiting(stay[0].round), "it waits")
        # Two are needed. Without the one for whose sake the third left, that comes back.
        stay[1].links.report([stay[0].id], undo=False)
        assert stay[0].links.part() == stay[0]._me.host
        ended(stay)
        out = in_thread(stay[0].next_rendezvous)
        meet(stay[1:])
        assert waits.result(PATIENCE).world_size == 2
        assert stay[1].round.drained == {stay[0]._me.host: stay[1]._me.host}
        until(lambda: stay[1]._records.waiting(stay[1].round), "it waits, too")
        end(bad, out)


def test_a_host_that_left_comes_back_rather_than_that_the_job_lacks_a_node():
    """And does not leave again when the other one is back, unless they still do not hear each other."""
    with on_hosts("abc", 2, 2, spares=1, silence=1.5, last_call=0.5) as (_, nodes):
        spare = nodes.pop()
        takes = waits_for_a_place(spare, nodes)
        nodes[1].links.report([nodes[0].id], undo=False)
        until(lambda: nodes[0].links.part() == "b", "b leaves")  # its spare is heard again, where processors are busy
        ended(nodes)
        waits = in_thread(nodes[1].next_rendezvous)
        meet(nodes[:1])
        assert takes.result(PATIENCE).world_size == 2
        kill(spare)
        ended(nodes[:1])
        assert {info.world_size for info in meet(nodes[:1])} == {2} and not nodes[0].round.drained
        assert waits.result(PATIENCE).world_size == 2
        end(nodes[0])


def test_reports_outlive_the_store_and_those_of_lost_nodes_count_for_nothing():
    with on_hosts("abc") as (_, nodes):
        first, one, two = by_rank(nodes)
        one.links.report([two.id], undo=False)
        key = one._records._key(one.round.name, "apart")
        one._records.connection.delete(key)
        assert not first.links.unheard()
        one._announce(one._records, one.round)
        assert not first.links.unheard(), "once to each store"
        one._announce(one._records.at(one._records.connection), one.round)
        assert first.links.unheard() == [(1, 2)]
        kill(two)
        ended([first])
        until(lambda: two.id in first._records.gone(first.round), "it is reported")
        assert first.links.part() == ""
        meet([first, one])
        end(first)


def test_a_job_that_waits_says_for_whom_and_where():
    with agents(2, 2) as job:
        nodes = job.several(2)
        place = nodes[0]._records.place
        assert nodes[0].links.awaited() == f"0 of 2 nodes have come to {place}"
        meet(nodes)
        assert nodes[0].links.awaited() == ""
        nodes[0].lost([])
        nodes[0]._records.end(nodes[0].round)
        comes = in_thread(nodes[0].next_rendezvous)
        until(lambda: nodes[0].links.awaited().startswith("1 of 2"), "it waits")
        assert nodes[0].links.awaited() == f"1 of 2 nodes have come to {place}, waiting for {nodes[1]._me.host}"
        meet(nodes[1:])
        comes.result(PATIENCE)
        assert nodes[0].links.awaited() == ""
        end(nodes[0])
