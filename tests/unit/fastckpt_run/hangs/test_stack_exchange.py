"""The exchange of stacks among agents: real servers and channels, and real workers that are caught."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fastckpt._core.policy import hangs
from fastckpt._core.saver.peers.peer_round import PeerRound
from fastckpt.errors import FastckptError
from fastckpt_run.hangs import detector, process_activity, stack_exchange
from fastckpt_run.hangs.stack_exchange import FOUND, STACKS
from tests.support.waits import until
from tests.unit.fastckpt_run.hangs.agents import EXECS, LOOPS, SECRET, SLEEPS, WAITS, CaughtWorker, HungJob

ODD = "1 of 3 ranks, rank 2 on host host2, is in train (train.py:"


@contextlib.contextmanager
def caught(*programs):
    with contextlib.ExitStack() as stack:
        made = [CaughtWorker(program) for program in programs]
        for worker in made:
            stack.callback(worker.end)
            worker.wait_until_caught()
        yield made


@pytest.fixture(scope="module")
def workers():
    """Two that wait in a collective, and one that is elsewhere; none of the tests that have these ends them."""
    with caught(WAITS, WAITS, SLEEPS) as made:
        yield made
        assert all(worker.is_alive() for worker in made), "to be asked ends nobody"


@pytest.fixture
def job(workers, tmp_path):
    with contextlib.ExitStack() as stack:
        yield HungJob(workers, tmp_path, stack)


@pytest.fixture
def impatient(monkeypatch):
    """Who gives no answer is not waited for long."""
    monkeypatch.setattr(stack_exchange, "REACH", 1.5)


@pytest.fixture
def silent_address():
    """An address at which whoever connects gets no answer: an agent that is stopped, as the kernel goes on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_agents_that_find_a_hang_have_all_nodes_asked_once_and_again_about_a_later_one(job, events):
    asked, told = job.counted(STACKS), job.counted(FOUND)
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda node: node.collect(silent=60.0).groups.line, job.nodes)
    assert sorted(asked) == [0, 1, 2]
    (line,) = {*found}
    assert line.startswith(ODD)
    assert line.endswith("ranks 0-1 on hosts host0 and host1 wait in all_reduce (train.py:16)")
    assert len(told) <= 2, "who has asked by then is not told"
    job.nodes[2].collect(silent=0.0)
    assert len(asked) == 6, "its ranks have reported since"
    job.meet()
    job.nodes[2].collect(silent=60.0)
    assert len(asked) == 9


def test_a_node_that_is_dead_or_stopped_is_named_and_a_first_one_is_an_error(job, impatient, silent_address):
    job.nodes[1].saver._peers.close()
    found = job.nodes[0].collect().groups
    assert found.line.startswith(ODD) and found.unheard == ("host1",) and found.missing == "1"
    job.peers[2] = replace(job.peers[2], address=silent_address)
    job.meet()
    found = job.nodes[0].collect().groups
    assert found.line.endswith(
        "; the agents on hosts host1 and host2 gave no answer (ranks 1-2); what the others wait for may be there"
    )
    job.nodes[0].saver._peers.close()
    with pytest.raises(OSError):
        job.nodes[1].collect()
    job.peers[0] = replace(job.peers[0], address=silent_address)
    job.meet()
    with pytest.raises(OSError, match="timed out"):
        job.nodes[1].collect()


def test_a_node_of_another_round_gives_no_answer(job, impatient):
    strangers = [replace(job.peers[0], id="another"), *job.peers[1:]]
    job.nodes[1].channel.meet(PeerRound(strangers, 1, SECRET))
    assert job.nodes[0].collect().groups.unheard == ("host1",)
    with pytest.raises(FastckptError, match="not in this round"):
        job.nodes[2].channel.meet(PeerRound([*job.peers[:2], replace(job.peers[2], id="new")], 2, SECRET))
        job.nodes[2].collect()


def test_workers_wait_for_a_phase_of_another_node_that_keeps_to_its_limit_and_not_for_those_started_since(job):
    told = job.counted(FOUND)
    job.nodes[2].line.enter("evaluation", 60 * 10**9)
    job.nodes[2].watch.end_hang(may_restart=True)
    found = job.nodes[0].collect()
    assert (found.groups, found.occupied, told) == (None, ("host2",), [])
    job.nodes[2].line.enter("")
    job.nodes[2].watch.end_hang(may_restart=True)
    assert job.nodes[0].collect().groups is not None, "that answer is not kept"
    for node in (job.nodes[0], job.nodes[2]):
        node.watch._workers.started -= 100
    assert job.nodes[0].collect(lately=50).groups.unheard == ("host1",)


@pytest.mark.parametrize("why", ["", "one computes", "one node gives no answer"])
def test_auto_finds_a_hang_if_no_worker_of_any_node_may_do_something(impatient, tmp_path, monkeypatch, why):
    """Idle workers hang after half a second, not a minute; collectives end after two."""
    monkeypatch.setattr(hangs, "IDLE", 0.5)
    monkeypatch.setattr(process_activity, "_WINDOW", 0.1)
    monkeypatch.setattr(detector, "_ASK_AGAIN", 0.2)
    monkeypatch.setattr(stack_exchange, "IDLE_SHARED", 0.1)
    with caught(WAITS, WAITS, LOOPS if why == "one computes" else SLEEPS) as made, contextlib.ExitStack() as stack:
        job = HungJob(made, tmp_path, stack)

        def look() -> bool:
            time.sleep(0.02)
            return any([node.watch.end_hang(may_restart=True) for node in job.nodes])

        for node in job.nodes:
            node.watch._setting = "auto"
            node.line.wait_at_most(2 * 10**9)
        for _ in range(3):
            for node in job.nodes:
                node.line.step()
                assert not node.watch.end_hang(may_restart=True)
        if not why:
            until(look)
            return
        if why == "one node gives no answer":
            job.nodes.pop().saver._peers.close()
        looks = list[bool]()
        until(lambda: looks.append(look()) or job.nodes[0].watch._seen.idle > 0.5)  # by itself it would be one
        assert not any([*looks, *(look() for _ in range(40))])


def test_a_worker_that_is_stopped_or_was_replaced_is_named_without_its_stack(workers, tmp_path):
    with caught(LOOPS, EXECS, SLEEPS) as odd, contextlib.ExitStack() as stack:
        odd[2].stop()
        found = HungJob([*workers[:2], *odd], tmp_path, stack).nodes[1].collect().groups
        states = {group.ranks: group.state for group in found.groups}
        assert states == {(4,): "stopped", (2,): "elsewhere", (3,): "unknown", (0, 1): "waits"}
        assert [group.ranks for group in found.odd] == [(4,)]
