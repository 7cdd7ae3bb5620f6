"""Drains of hosts, over real stores: left out, taken back in, twice, unknown, lost meanwhile, too many."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousTimeoutError

from fastckpt_run.rendezvous import first_node, host_drain, meeting
from fastckpt_run.rendezvous import handler as handler_module
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler as Handler
from fastckpt_run.rendezvous.host_drain import DrainRefused
from tests.unit.fastckpt_run.rendezvous.agents import PATIENCE, Agents, agents, ended, in_thread, kill, meet, until


@contextmanager
def on_hosts(names: str, fewest: int = 1, most: int = 0, **options: Any) -> Iterator[tuple[Agents, list[Handler]]]:
    """A job with agents on hosts of these names that meet, but for those that are more than take part.

    The first one holds the store.
    """
    with agents(fewest, most or len(names), **options) as job:
        made = job.several(len(names))
        for handler, name in zip(made, names, strict=True):
            handler._me = handler._me._replace(host=name, address=f"address of {name}")
        meet(made[: most or None])
        yield job, made


def hosts(handler: Handler) -> list[str]:
    return [node.host for node in handler.round.nodes]


def drained(nodes: list[Handler], out: int) -> list[Handler]:
    """Drain the host of one of these that have met; the others, which meet without it."""
    left = in_thread(lambda: nodes[0].host_drain().leave_out(nodes[out]._me.host))
    ended(nodes)
    stay = [node for number, node in enumerate(nodes) if number != out]
    meet(stay)
    assert left.result(PATIENCE).name == stay[0].round.name
    return stay


def waits_for_a_place(node: Handler, members: list[Handler]) -> "Future[object]":
    waits = in_thread(node.next_rendezvous)
    until(lambda: members[0]._records.waiting(members[0].round), "it waits")
    return waits


def end(node: Handler, *waiting: "Future[object]") -> None:
    """End the job, by which those that wait for a place end, too."""
    node.shutdown()
    for future in waiting:
        assert isinstance(future.exception(PATIENCE), RendezvousGracefulExitError)


@pytest.fixture
def addresses(monkeypatch) -> None:
    """Rounds meet on this machine, whatever the addresses of nodes are called."""
    real = first_node.store_of_round
    for module in (first_node, handler_module):
        monkeypatch.setattr(module, "store_of_round", lambda address, port=None: real("127.0.0.1", port))


pytestmark = pytest.mark.usefixtures("addresses")


def test_a_host_is_found_by_any_name_of_its_address_and_others_are_refused(monkeypatch):
    """One that the job knows is not looked up."""
    names = {"b.example.org": ["192.0.2.1", "address of b"], "c": ["address of b"]}  # the latter is out of date
    monkeypatch.setattr(host_drain, "addresses_of", lambda name: names.get(name, []))
    with on_hosts("abc", 2) as (_, nodes):
        find = nodes[0].host_drain().find
        assert [find(name)[0] for name in ("b.example.org", "address of b", "b", "c")] == ["b", "b", "b", "c"]
        with pytest.raises(DrainRefused, match=r"no node of the job is on d\.example\.org; there are: a, b, c"):
            find("d.example.org")
        nodes[0]._me = nodes[0]._me._replace(address="127.0.0.1")
        meet(nodes)
        drain = nodes[1].host_drain()
        with pytest.raises(DrainRefused, match="a holds the store of the rendezvous, and no other host may"):
            drain.find("a")
        with pytest.raises(DrainRefused, match="b is not drained; drained are: none"):
            drain.take_back("b")


def test_a_spare_takes_the_place_of_a_drained_host_which_is_no_spare():
    with on_hosts("abc", 2, 2, spares=1, last_call=30.0) as (_, nodes):
        spare = nodes.pop()
        with pytest.raises(DrainRefused, match=r"b is not drained: the job needs 2 nodes .*with 0 that wait"):
            nodes[0].host_drain().find("b")
        takes = waits_for_a_place(spare, nodes)
        assert nodes[0].host_drain().find("b") == ("b", False)
        left = in_thread(lambda: nodes[0].host_drain().leave_out("b"))
        ended(nodes)
        waits = in_thread(nodes[1].next_rendezvous)
        first = in_thread(nodes[0].next_rendezvous)
        assert takes.result(PATIENCE).rank == 1 and first.result(PATIENCE).rank == 0
        assert [node.host for node in left.result(PATIENCE).nodes] == ["a", "c"]
        assert nodes[0].host_drain().find("b") == ("b", True)
        kill(spare)
        ended(nodes[:1])
        last = in_thread(nodes[0].next_rendezvous)
        time.sleep(1.0)
        assert not last.done(), "the job waits for another node than the drained one"
        with pytest.raises(DrainRefused, match="a is not drained: the job needs 2 nodes"):
            nodes[0].host_drain().find("a")
        assert nodes[0].host_drain().take_back("b") == ("b", False)
        assert last.result(PATIENCE).world_size == 2 and hosts(nodes[0]) == ["a", "b"]
        assert nodes[0].host_drain().find("c") == ("c", False), "it was lost a while ago"
        assert waits.result(PATIENCE).world_size == 2
        end(nodes[0])


def test_a_spare_that_is_drained_ends_no_round_and_takes_no_place():
    with on_hosts("abc", 1, 2, spares=1) as (_, nodes):
        waits = waits_for_a_place(nodes.pop(), nodes)
        drain = nodes[0].host_drain()
        assert drain.find("c") == ("c", False)
        before = nodes[0].round.name
        assert drain.leave_out("c").name == before and drain.find("c") == ("c", True)
        kill(nodes.pop())
        ended(nodes)
        meet(nodes)
        assert hosts(nodes[0]) == ["a"] and nodes[0].round.drained == {"c": ""}
        end(nodes[0], waits)


def test_a_drain_outlives_the_store_and_a_drained_host_that_alone_is_left_does_not_wait_for_ever(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "FIRST_REPORT", 0.5)
    with on_hosts("ab", join=2.0, silence=0.5) as (_, nodes):
        (one,) = drained(nodes, 1)
        # As in a store that begins again: who knows the last round brings it along.
        records = one._records
        records.connection.delete(records._key("last"))
        assert records.at(records.connection).carry_over(one.round).drained == {"b": ""}
        assert records.at(records.connection).last_round().drained == {"b": ""}
        waits = waits_for_a_place(nodes[1], nodes)
        kill(nodes.pop(0))
        assert isinstance(waits.exception(PATIENCE), RendezvousTimeoutError)
        assert "these hosts are drained, and not waited for: b (fastckpt drain --undo HOST)" in caplog.text


def test_a_host_that_is_lost_during_its_drain_is_left_out_and_counts_as_lost():
    with on_hosts("abc", 2, spares=1, exclude_after=9, silence=1.0) as (_, nodes):
        left = in_thread(lambda: nodes[0].host_drain().leave_out("b"))
        ended(nodes)
        kill(nodes[1])
        meet([nodes[0], nodes[2]])
        assert [node.host for node in left.result(PATIENCE).nodes] == ["a", "c"]


def test_a_round_that_does_not_come_in_time_is_reported(monkeypatch):
    monkeypatch.setattr(host_drain, "_NEXT_ROUND", 0.5)
    with on_hosts("abc", 2) as (_, nodes):
        late = r"has not begun another round within 0\.5 s.*b is left out when it does"
        with pytest.raises(DrainRefused, match=late):
            nodes[0].host_drain().leave_out("b")
        meet([nodes[0], nodes[2]])
        assert hosts(nodes[0]) == ["a", "c"]
