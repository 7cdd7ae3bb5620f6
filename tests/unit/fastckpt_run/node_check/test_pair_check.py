"""Several nodes that check each other, as threads over a real store: absent, late, unreachable; their messages."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from torch.distributed import HashStore

from fastckpt._core.config import Settings
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.policy.node_check import CheckResult, Verdict
from fastckpt_run.members import Member
from fastckpt_run.node_check import pair_check
from fastckpt_run.node_check.board import Board
from fastckpt_run.node_check.node_check import NodeCheck, NodeCheckFailed
from fastckpt_run.node_check.pair_check import CheckGone, PairCheck
from fastckpt_run.rendezvous.round_waits import RoundEnded

OK, PROBLEM, UNKNOWN = Verdict.OK, Verdict.PROBLEM, Verdict.UNKNOWN
NOBODY = "192.0.2.1"
"""An address that no host has (RFC 5737)."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Waits in vain last seconds."""
    monkeypatch.setattr(pair_check, "EXCHANGE", 2.0)
    monkeypatch.setattr(pair_check, "_MARGIN", 5.0)


def results(rate=10.0):
    return [CheckResult("memory", OK, value=rate, unit="GB/s"), CheckResult("shm", OK, value=rate, unit="MB")]


def take_part(store, count, *, addresses=None, rates=None, absent=(), late=None, wait=20.0, mute=-1):
    """The outcome of each node that is there; one may exchange no data."""

    def one(rank):
        time.sleep((late or {}).get(rank, 0.0))
        address = (addresses or {}).get(rank, "127.0.0.1")
        own = results((rates or {}).get(rank, 10.0))
        check = PairCheck(Board(store, "check/"), rank, range(count), address, own, wait)
        if rank == mute:
            check._exchange = lambda *_: (_ for _ in ()).throw(TimeoutError)
        return check.run()

    there = [rank for rank in range(count) if rank not in absent]
    with ThreadPoolExecutor(count) as pool:
        return dict(zip(there, pool.map(one, there), strict=True))


def test_of_two_nodes_neither_is_called_bad_that_does_not_reach_the_other_and_a_slow_one_is_named_to_both(monkeypatch):
    outcomes = take_part(HashStore(), 2, rates={1: 4.0})
    assert outcomes[1].result.verdict is PROBLEM and not outcomes[1].is_bad
    assert outcomes[1].result.message == "memory at 4, less than half of the other nodes"
    assert all(one.slow == [1] and set(one.hosts) == {1} for one in outcomes.values())
    monkeypatch.setattr(pair_check, "EXCHANGE", 0.5)
    for one in take_part(HashStore(), 2, addresses={1: NOBODY}).values():
        assert one.result.verdict is UNKNOWN and "cannot be told whose fault" in one.result.message


@pytest.mark.parametrize(("absent", "late"), [([1, 2], {}), ([], {1: 0.5})])
def test_nodes_that_do_not_come_are_named_and_late_ones_waited_for(absent, late):
    outcomes = take_part(HashStore(), 3, absent=absent, late=late, wait=1.0 if absent else 20.0)
    assert all(one.absent == absent and one.result.verdict is OK for one in outcomes.values())


def test_a_round_that_ends_ends_the_check_and_so_does_the_loss_of_the_node_that_decides(monkeypatch):
    ended = threading.Event()
    threading.Timer(0.2, ended.set).start()
    with pytest.raises(RoundEnded):
        PairCheck(Board(HashStore(), "", ended.is_set), 0, [0, 1], "127.0.0.1", [], 60.0).run()
    monkeypatch.setattr(pair_check, "_MARGIN", 0.2)
    with pytest.raises(CheckGone, match="rank 0, which decides, has not answered"):
        take_part(HashStore(), 2, absent=[0], wait=0.2)


def test_a_node_that_exchanges_data_with_nobody_is_bad_and_the_others_are_not():
    outcomes = take_part(HashStore(), 3, mute=2)
    assert outcomes[2].is_bad and outcomes[2].result.verdict is PROBLEM
    assert outcomes[2].result.message.startswith("exchanges no data with ")
    assert [one.bad for one in outcomes.values()] == [[2]] * 3
    assert not outcomes[0].is_bad and not outcomes[1].is_bad


def test_a_want_of_threads_keeps_nobody_out_once_there_are_some(monkeypatch):
    secret, wants, start = b"s" * 32, [RuntimeError("can't start new thread")] * 100, threading.Thread.start

    def refuse(thread):
        if thread._target.__name__ == "_greet" and wants:
            raise wants.pop()
        start(thread)

    monkeypatch.setattr(pair_check, "_PAUSE", 0.01)
    with pair_check._Listener() as listener, monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", refuse)
        assert len(wants) > pair_check._PENDING
        for _ in range(len(wants) + 1):  # the last one is a stranger
            socket.create_connection(("127.0.0.1", listener.port), timeout=10).close()
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, (1, 0), secret, time.monotonic() + 10)
            with closing(SealedConnection.connect(f"127.0.0.1:{listener.port}", secret, 10.0)) as link:
                link.send({"turn": 1, "from": 0})
                accepted.result().close()


# --- when the agents of a round check each other


def members(*checks):
    return [
        Member(f"id-{rank}", f"host{rank}", "", address="127.0.0.1:1", checks=each) for rank, each in enumerate(checks)
    ]


def test_one_newcomer_has_all_nodes_with_the_option_check_each_other_and_who_is_alone_checks_nothing():
    store, others = HashStore(), members(1, -1, 0)
    with ThreadPoolExecutor(3) as pool:
        checks = {rank: NodeCheck(Settings()) for rank in (0, 2)}
        found = [pool.submit(one.with_others, store, others, rank, lambda: False) for rank, one in checks.items()]
        assert [each.result(60) for each in found] == [[], []]
    for known, rank in (([0], 0), ([-1, 0, 0], 0), ([3, 2, -1], 1)):
        assert NodeCheck(Settings()).with_others(HashStore(), members(*known), rank, lambda: False) is None


def test_a_node_that_others_lose_twice_during_its_exchanges_gives_up_its_place():
    check = NodeCheck(Settings())
    check.given_up()  # not while it exchanged data: that is a matter of the rendezvous
    for number in range(2):
        with pytest.raises(RoundEnded):
            check.with_others(HashStore(), members(0, 0), 1, lambda: True)
        if number == 0:
            check.given_up()
    with pytest.raises(NodeCheckFailed, match="have lost it 2 times while it exchanged data"):
        check.given_up()
