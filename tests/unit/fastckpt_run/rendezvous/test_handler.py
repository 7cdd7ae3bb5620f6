"""Rounds of a rendezvous, over real stores: each way in which a node leaves, comes late, twice, or not at all."""

import base64
import multiprocessing
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from fastckpt_run.rendezvous import first_node, handler, meeting, store_connection
from fastckpt_run.rendezvous.endpoints import Endpoints
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler
from fastckpt_run.rendezvous.membership import Master, Round
from fastckpt_run.rendezvous.round_waits import RoundEnded
from fastckpt_run.rendezvous.store_connection import StoreConnection, StoreLost, threads_end
from tests.support.ports import free_port
from tests.unit.fastckpt_run.rendezvous.agents import (
    PATIENCE,
    agents,
    by_rank,
    ended,
    guests,
    in_thread,
    join,
    kill,
    meet,
    met,
    places,
    ranks,
    until,
)


def test_a_round_takes_at_most_twenty_messages_a_node(count=8):
    with agents(count, count, interval=60.0, silence=180.0) as job:
        nodes = job.several(count)
        for _ in ("first", "later"):
            job.calls.clear()
            infos = meet(nodes)
            looks = 20  # of who decides, more often the longer it takes the others to come
            assert sum(job.calls.values()) <= 20 * count + looks, job.calls
            assert sorted(info.rank for info in infos) == list(range(count))
            assert {info.world_size for info in infos} == {count}
            assert len({info.bootstrap_store_info.master_port for info in infos}) == 1


def test_a_node_that_was_reported_lost_while_the_others_meet_is_not_waited_for():
    with met(3, 2, silence=600.0) as (_, nodes):
        kill(nodes[2])
        futures = [in_thread(node.next_rendezvous) for node in nodes[:2]]
        time.sleep(0.3)
        assert not any(future.done() for future in futures)
        nodes[0].lost([nodes[2].id, "a stranger", nodes[0].id])
        assert all(future.result(PATIENCE) for future in futures) and sorted(ranks(nodes[:2])) == [0, 1]


def test_a_newcomer_ends_a_running_round_only_when_it_is_ready():
    with agents(1, 3) as job:
        nodes = job.several(2)
        began, ready = threading.Event(), threading.Event()
        for node in nodes:
            node.before_joining = ready.set  # nobody trains yet: there is nothing to wait for
        meet(nodes)
        kept, newcomer = ranks(nodes), job.new()
        assert not ready.is_set()
        newcomer.before_joining = lambda: (began.set(), ready.wait(PATIENCE))
        joined = in_thread(newcomer.next_rendezvous)
        assert began.wait(PATIENCE)
        time.sleep(3 * job.timing.interval)
        assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
        ready.set()
        ended(nodes)
        meet(nodes)
        joined.result(PATIENCE)
        assert ranks([*nodes, newcomer]) == [*kept, 2]


def test_a_spare_that_decides_does_so_as_soon_as_all_have_come():
    with met(2, 2, interval=2 * PATIENCE, silence=600.0, spares=1) as (job, nodes):  # which nobody may wait for
        spare = job.new()
        waits = in_thread(spare.next_rendezvous)
        records = spare._records
        until(lambda: records is not None and records.slots(nodes[0].round) == 1, "the spare has a place")
        kill(nodes[1])
        nodes[0].lost([nodes[1].id])
        assert nodes[0].next_rendezvous().world_size == 2
        waits.result(PATIENCE)
        assert spare.round.ranks.keys() == {nodes[0].id, spare.id}


def test_a_spare_node_ends_in_good_order_with_the_job_and_others_are_refused():
    with agents(1, 1) as job:
        nodes = job.several(3)
        meet(nodes[:1])
        joined = in_thread(nodes[1].next_rendezvous)
        until(lambda: job.calls["add"] >= 3, "it waits")
        assert not nodes[2].is_closed()
        nodes[0].set_closed()
        with pytest.raises(RendezvousGracefulExitError):
            joined.result(PATIENCE)
        assert nodes[2].is_closed()
        with pytest.raises(RendezvousClosedError):
            nodes[2].next_rendezvous()
        with pytest.raises(RendezvousClosedError):
            nodes[0].next_rendezvous()


def test_nodes_learn_from_the_first_one_that_ends_the_job_why_it_did_also_when_its_store_has_gone():
    with met(3, 3) as (_, nodes):
        holder, follower, other = sorted(nodes, key=lambda node: node._endpoints.server is None)
        holder.why_ended, follower.why_ended = lambda: "rank 0 died: exit code 3", lambda: "rank 1 died: exit code 1"
        holder.set_closed()
        follower._alive.stop()  # the thread that watches the round comes too late
        follower.set_closed()  # it failed for want of the first
        holder.shutdown()
        text = f"another node has ended the job, {socket.gethostname()}: rank 0 died: exit code 3"
        for node in (follower, other):
            with pytest.raises(RendezvousClosedError, match=f"^{re.escape(text)}$"):
                node.next_rendezvous()


def test_the_next_node_decides_when_those_before_it_died_without_a_record_or_before_they_decided():
    with agents(2, 2, silence=1.0) as job:
        nodes = job.several(3)
        first = nodes[1]
        records = first._alive.store
        records.connection.add(records._key("first", "slots"), 1)
        assert records.join(records.last_round(), first._me) == 1
        kill(first)
        meet([nodes[0], nodes[2]])
        assert sorted(ranks([nodes[0], nodes[2]])) == [0, 1]


@pytest.fixture
def unreached(monkeypatch) -> Iterator[None]:
    """Nodes give up early what they do not reach."""
    monkeypatch.setattr(first_node, "_UNREACHED", 0.5)
    monkeypatch.setattr(first_node, "_REACH", 1.5)
    for module in (first_node, handler):
        monkeypatch.setattr(module, "WAIT", timedelta(seconds=3))
    monkeypatch.setattr(handler, "given_up", threading.Event())
    yield
    assert threads_end(PATIENCE)


def announces_elsewhere(first: FastckptRendezvousHandler, port: int) -> Callable[[Round, Master], None]:
    """Announcement of the store of a round's first node at a port where another one, or nobody, listens."""
    records = first._records
    announce = records.announce
    return lambda round, master: announce(round, replace(master, port=port))


@pytest.mark.usefixtures("unreached")
def test_a_node_that_alone_does_not_reach_the_first_one_leaves_if_that_can_go_on(monkeypatch):
    with guests(2, 1, 2) as (_, (first, second)):
        with monkeypatch.context() as patched:
            patched.setattr(first._records, "announce", announces_elsewhere(first, free_port()))
            begun = [in_thread(node.next_rendezvous) for node in (first, second)]
            with pytest.raises(RendezvousConnectionError, match="does not reach the first of them"):
                begun[1].result(PATIENCE)
            begun[0].result(PATIENCE)
        until(first.num_nodes_waiting, "the first one sees that the other has left")
        assert first.next_rendezvous().world_size == 1
        second.shutdown()
        assert not first.is_closed()


@pytest.mark.usefixtures("unreached")
@pytest.mark.parametrize(("fewest", "count"), [(2, 2), (1, 3)], ids=["needed", "not alone"])
def test_a_node_that_is_needed_or_not_alone_goes_on_trying_to_reach_the_first_one(monkeypatch, fewest, count):
    with met(count, fewest) as (_, nodes):
        first, *others = by_rank(nodes)
        port = free_port()
        with monkeypatch.context() as patched:
            patched.setattr(first._records, "announce", announces_elsewhere(first, port))
            begun = [in_thread(node.next_rendezvous) for node in (first, *others)]
            begun[0].result(PATIENCE)
            time.sleep(2.5)  # longer than one that is dispensable waits
            assert not any(each.done() for each in begun[1:])
            late = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            assert {each.result(PATIENCE).world_size for each in begun[1:]} == {count}
        del late


@pytest.mark.usefixtures("unreached")
def test_a_spare_that_nobody_reaches_as_the_first_node_leaves_and_the_next_one_takes_the_rank(monkeypatch):
    with guests(3, 3, 3, spares=2, exclude_after=2, silence=600.0) as (job, (lost, *others)):
        bad, good = job.new(host=False), job.new(host=False)
        begun = []
        for number, (name, spare) in enumerate({"bad": bad, "good": good}.items()):
            spare._me = spare._me._replace(host=name)
            begun.append(in_thread(spare.next_rendezvous))
            until(lambda number=number: others[0]._records.slots(lost.round) > number, "it waits")
        monkeypatch.setattr(bad._records, "announce", announces_elsewhere(bad, free_port()))
        kill(lost)
        others[0].lost([lost.id])
        ended(others)
        members = [in_thread(node.next_rendezvous) for node in others]
        begun[0].result(PATIENCE)
        until(bad.num_nodes_waiting, "the round has ended for it")
        with pytest.raises(RendezvousConnectionError, match="the other nodes do not reach this one"):
            bad.next_rendezvous()
        assert all(each.result(PATIENCE) for each in (*members, begun[1]))
        assert ranks([good, *others]) == [0, 1, 2]
        assert good.round.faults["bad"] == ("lost in round 2",)
        bad.shutdown()
        assert not good.is_closed()


@pytest.mark.usefixtures("unreached")
def test_a_first_node_that_dies_when_it_has_announced_its_store_is_passed_over(monkeypatch):
    """Also where something accepts in its place, and never answers."""
    with guests(3, 1, 3) as (_, (first, *others)), socket.create_server(("127.0.0.1", 0)) as mute:
        announce = announces_elsewhere(first, mute.getsockname()[1])

        def announce_and_die(round: Round, master: Master) -> None:
            first._master = None
            announce(round, master)
            first._alive.stop()
            raise SystemExit

        monkeypatch.setattr(first._records, "announce", announce_and_die)
        begun = [in_thread(node.next_rendezvous) for node in (first, *others)]
        found = [each.result(PATIENCE) for each in begun[1:]]
        assert [info.world_size for info in found] == [2, 2]


def test_too_few_nodes_end_with_a_timeout_and_no_store_with_an_error_that_names_endpoints(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "FIRST_REPORT", 0.1)
    with agents(2, 2, join=0.5) as job:
        with pytest.raises(RendezvousTimeoutError, match=rf"1 of 2 nodes came to {job.endpoint} in 0\.5 s"):
            job.new().next_rendezvous()
        assert f"1 of 2 nodes have come to {job.endpoint}; waiting" in caplog.text
    for text in ("a:1,,b:1", "a:1,"):
        with pytest.raises(ValueError, match="has an empty one"):
            Endpoints(text, is_here=lambda _: False)
    with agents(connect=0.3) as job, pytest.raises(RendezvousConnectionError, match=rf"{job.endpoint} after 0\.3 s, "):
        job.new(host=False)
    unknown = pytest.raises(RendezvousConnectionError, match=r"\(no\.such\.invalid: no such name on this host\)")
    with agents(connect=0.3, endpoint="no.such.invalid:1") as job, unknown:
        job.new(host=False)


def test_survivors_go_on_in_the_store_of_the_next_host_and_the_lost_one_comes_back_to_it():
    with met(3, silence=1.0, endpoint=places(2)) as (job, nodes):
        kept, number = ranks(nodes[1:]), nodes[1].round.number
        kill(nodes[0])
        ended(nodes[1:])
        meet(nodes[1:])
        assert nodes[1].round.number == number + 1
        assert all(now == before for now, before in zip(ranks(nodes[1:]), kept, strict=True) if before < 2)
        before, back = ranks(nodes[1:]), job.new()
        join(back, nodes[1:])
        assert back.round == nodes[1].round and back._endpoints.server is None
        assert sorted(before) == [0, 1] and ranks([*nodes[1:], back]) == [*before, 2]


def test_spares_that_reach_another_store_before_a_member_wait_for_it_and_it_keeps_its_rank():
    """They would begin the job once more else, from the last durable save or from none."""
    with met(2, 2, silence=1.0, last_call=15.0, endpoint=places(2), spares=2) as (job, nodes):
        meet(nodes)
        spares = [job.new(), job.new()]
        joined = [in_thread(spare.next_rendezvous) for spare in spares]
        until(lambda: len(nodes[0]._records.waiting(nodes[0].round)) == 2, "they wait")
        kept = ranks(nodes[1:])
        kill(nodes[0])
        ended(nodes[1:])
        time.sleep(1.5)
        assert not any(future.done() for future in joined)
        nodes[1].lost([nodes[0].id])
        meet(nodes[1:])
        until(lambda: any(future.done() for future in joined), "a spare has the free rank")
        assert nodes[1].round.number == 3 and ranks(nodes[1:]) == kept
        waiting = [future for future in joined if not future.done()]
        nodes[1].set_closed()
        assert all(isinstance(future.exception(PATIENCE), RendezvousGracefulExitError) for future in waiting)
        until(lambda: threads_end(0.1), "calls of the dead store have ended")


def test_a_node_that_waits_holds_no_member_for_gone_whose_rounds_it_did_not_see():
    with agents(2, 2, silence=600.0, spares=1, exclude_after=2) as job:
        nodes = job.several(3)
        meet(nodes[:2])
        good, bad = by_rank(nodes[:2])
        for node, host in zip((good, bad, nodes[2]), ("good", "bad", "spare"), strict=True):
            node._me = node._me._replace(host=host)
        joined = in_thread(nodes[2].next_rendezvous)
        until(lambda: job.calls["add"] >= 5, "it waits")
        bad.fault = "signal 9"
        meet([good, bad])
        bad.fault = "signal 7"
        bad.lost([good.id])  # which comes all the same, and first: else the two others have their round without it
        calls = job.calls["add"]
        comes = in_thread(good.next_rendezvous)
        until(lambda: job.calls["add"] > calls, "it comes")
        waits = in_thread(bad.next_rendezvous)
        comes.result(PATIENCE)
        joined.result(PATIENCE)
        restarted = in_thread(nodes[2].next_rendezvous)
        time.sleep(1.0)
        assert not restarted.done() and not waits.done()
        meet([good])
        restarted.result(PATIENCE)
        assert ranks([good, nodes[2]]) == [0, 1] and not waits.done()
        good.set_closed()
        assert isinstance(waits.exception(PATIENCE), RendezvousGracefulExitError)


def test_members_train_on_when_a_store_is_lost_that_none_of_them_held():
    with agents(1, 2, silence=600.0, last_call=0.2) as job:
        nobody = job.new(job="another")
        nodes = [job.new(), job.new()]
        meet(nodes)
        name = nodes[0].round.name
        kill(nobody)

        def is_in(node: FastckptRendezvousHandler) -> bool:
            with suppress(StoreLost):
                return (records := node._alive.store) is not None and records.last_round().name == name
            return False

        # Each finds or makes a store again, in the background.
        until(lambda: all(map(is_in, nodes)), "they have a store again, with the round in it")
        assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
        before = ranks(nodes)
        meet(nodes)
        assert ranks(nodes) == before


@pytest.fixture
def store_process() -> Iterator[tuple[int, str]]:
    """A process with a store, and where that is."""
    port = free_port()

    def hold() -> None:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        signal.pause()
        del store

    with closing(multiprocessing.get_context("fork").Process(target=hold)) as process:
        process.start()
        yield process.pid, f"127.0.0.1:{port}"
        process.kill()
        process.join()


def test_a_node_that_reaches_neither_most_others_nor_the_store_ends_its_round(store_process, monkeypatch):
    monkeypatch.setattr(store_connection, "SILENCE", 2.0)
    monkeypatch.setitem(StoreConnection._call.__kwdefaults__, "timeout", 2.0)
    pid, endpoint = store_process
    with agents(2, 2, silence=600.0, endpoint=endpoint) as job:
        nodes = [job.new(host=False) for _ in range(2)]
        meet(nodes)
        nodes[0].isolated([nodes[1].id])
        time.sleep(0.5)
        assert [node.num_nodes_waiting() for node in nodes] == [0, 0], "the store is there, and tells who is"
        os.kill(pid, signal.SIGSTOP)
        until(lambda: nodes[0].num_nodes_waiting() == 1, "the store has been silent for long")
        until(lambda: nodes[1]._alive.store is None, "the other node has found that, too")
        assert nodes[1].num_nodes_waiting() == 0, "it trains on"
        nodes[1].isolated([nodes[0].id])
        assert nodes[1].num_nodes_waiting() == 1
        os.kill(pid, signal.SIGCONT)


def test_agents_of_one_secret_meet_and_others_do_not(caplog):
    with agents(2, 2, join=1.0) as job:
        nodes = [job.new(secret=b"0123456789abcdef") for _ in range(2)]
        meet(nodes)
        for secret in (None, b"another secret..."):
            with pytest.raises(RendezvousTimeoutError):
                job.new(secret=secret).next_rendezvous()
        assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
    assert caplog.text.count("give one to all (--fast-secret-file, FASTCKPT_SECRET)") == 2
    assert "0123456789abcdef" not in caplog.text


def test_no_code_of_a_stranger_runs_and_no_record_of_one_is_believed(caplog, tmp_path):
    harm = tmp_path / "harm"
    pickled = f"cposix\nsystem\n(S'touch {harm}'\ntR.".encode()
    with agents(2, 2, silence=600.0, interval=0.05) as job:
        nodes = [job.new(secret=b"0123456789abcdef") for _ in range(2)]
        meet(nodes)
        stranger, own = job.stranger(), nodes[0]._alive.store
        keys = [key for key in stranger.list_keys() if "fastckpt/" in key]
        told = [own._key(nodes[0].round.name, "end"), own._key("last"), "torch.rendezvous.job"]
        bells = [*(key for key in keys if "/bell/" in key), *(own._key("bell", node.id) for node in nodes)]
        for value in (pickled, base64.b64encode(pickled), b"x", b"1 0 {}", b"2 0 {}"):
            for key in (*told, *(key for key in keys if "/beat/" in key)):
                stranger.set(key, value)
            for key in bells:
                stranger.set(key, b"1")
            time.sleep(0.2)
        before = ranks(nodes)
        meet(nodes)
        assert ranks(nodes) == before
    assert not harm.exists() and pickle.loads(pickled) == 0 and harm.exists()
    assert "in the store of the rendezvous was refused: its version is" in caplog.text


def test_the_end_of_the_agent_that_holds_the_store_prints_no_stack(capfd):
    """No call of a store is left behind, for which torch would print one when the store ends."""
    for _ in range(6):  # without care about half of the threads that listen would wait for another ring of the bell
        with met(1):
            pass
    assert "frame #" not in capfd.readouterr().err


def test_a_wait_ends_at_its_timeout_or_with_the_round_and_one_for_what_is_there_does_not():
    with met(2, 2) as (_, nodes):
        infos = meet(nodes)
        first, last = sorted(range(2), key=lambda each: ranks(nodes)[each])
        infos[last].store.set("written", b"1")
        with pytest.raises(RuntimeError, match="wait timeout"):
            infos[first].store.wait(["never written"], timedelta(milliseconds=50))
        kill(nodes[last])
        with pytest.raises(RoundEnded):
            infos[first].store.get("never written")
        assert nodes[first].ends_soon(0.0)
        assert infos[first].store.multi_get(["written"]) == [b"1"]
