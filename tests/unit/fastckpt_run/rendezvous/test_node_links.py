"""Nodes that do not hear each other, over real stores: who leaves, who stays, and when one that has left comes back."""

import pytest

from fastckpt_run.rendezvous.membership import left_out_of
from tests.unit.fastckpt_run.rendezvous.agents import PATIENCE, agents, ended, in_thread, kill, meet, until
from tests.unit.fastckpt_run.rendezvous.test_handler import by_rank
from tests.unit.fastckpt_run.rendezvous.test_host_drain import addresses, end, on_hosts

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
def test_a_host_is_left_out_as_long_as_there_is_the_one_that_it_does_not_reach(drained, here, out):
    assert left_out_of(drained, [*here]) == {*out}


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
