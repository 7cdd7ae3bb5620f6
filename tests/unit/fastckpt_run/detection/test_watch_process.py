"""The process that watches for an agent: it answers while the agent's interpreter does not, and follows the agent."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fastckpt._core import metrics
from fastckpt_run.detection.neighbor_watch import BEAT
from fastckpt_run.detection.probes import State
from fastckpt_run.detection.watch_process import SENT, WatchProcess
from fastckpt_run.detection.watch_service import AgentChannel
from tests.support.waits import until
from tests.unit.fastckpt_run.detection.test_neighbor_watch import LOOPBACK, SECRET

HOLD = "__import__('ctypes').PyDLL(None).sleep(4)"
"""An expression that holds the interpreter's lock for longer than members wait for a sign of life."""


class Agent(WatchProcess):
    """A member, as its agent sees it, which notes the losses that it learns of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: list[tuple[str, str]] = []
        super().__init__(SECRET, name, self._note, 2.0, LOOPBACK)

    def _note(self, members: Sequence[str], reason: str) -> None:
        self.lost += [(member, reason) for member in members]


def be_an_agent(name: str, pipe: Connection) -> None:
    agent = Agent(name)
    pipe.send((agent.address, agent.pid))
    agent.watch(pipe.recv())
    while True:
        pipe.send(eval(pipe.recv()))


class RemoteAgent:
    def __init__(self, name: str) -> None:
        self.name = name
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=be_an_agent, args=(name, theirs))
        self.process.start()
        theirs.close()
        self.address, self.watch_pid = self.pipe.recv()

    def watch(self, members: Sequence[tuple[str, str]]) -> None:
        self.pipe.send(members)

    def close(self) -> None:
        self.process.kill()
        with suppress(ProcessLookupError):
            os.kill(self.watch_pid, signal.SIGCONT)
        self.process.join()
        self.process.close()
        self.pipe.close()


@pytest.fixture
def trio() -> Iterator[tuple[Agent, Agent, RemoteAgent]]:
    """Three members that have heard each other: two of this process, and one of another."""
    remote, one, other = RemoteAgent("remote"), Agent("one"), Agent("other")
    ring = [(each.name, each.address) for each in (one, other, remote)]
    for each in (one, other, remote):
        each.watch(ring)
    everybody = {"one", "other", "remote"}
    until(lambda: one.answering(everybody) == other.answering(everybody) == everybody)
    time.sleep(3 * BEAT)
    yield one, other, remote
    remote.close()
    for each in (one, other):
        each.stop()


def test_an_agent_whose_interpreter_does_not_run_is_not_lost_and_its_process_stays_or_is_started_again(trio, caplog):
    one, other, remote = trio
    remote.pipe.send(HOLD)
    assert remote.pipe.recv() == 0 and one.answering(["remote", "a stranger"]) == {"remote"}
    # A process that watches, and did not run for a second, blames nobody.
    for _ in range(2):
        os.kill(one.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(one.pid, signal.SIGCONT)
        time.sleep(1.0)
    # Slurm sends SIGTERM to each process of a step; the agent has a checkpoint to write then, and others watch it.
    os.kill(other.pid, signal.SIGTERM)
    time.sleep(3 * BEAT)
    assert one.answering(["other"]) and "another one is started" not in caplog.text
    os.kill(other.pid, signal.SIGKILL)
    until(lambda: "another one is started" in caplog.text)
    until(lambda: one.answering(["other"]) and other.answering(["one"]))
    time.sleep(2.5)
    assert one.lost == other.lost == []
    before, pid = metrics.counts[SENT], other.pid
    other.stop()
    until(lambda: not Path(f"/proc/{pid}").exists())
    time.sleep(0.7)
    assert one.lost == [], "who leaves is not lost"
    one.stop()
    assert metrics.counts[SENT] - before >= 3 * 2


@pytest.mark.parametrize("state", [State.FROZEN, State.STARVED, State.GONE], ids=lambda state: state.name)
def test_an_agent_that_is_stopped_or_killed_is_lost_with_its_process_and_told_apart(trio, state):
    one, other, remote = trio
    if state is State.GONE:
        remote.process.kill()
    else:
        os.kill(remote.process.pid if state is State.FROZEN else remote.watch_pid, signal.SIGSTOP)
    until(lambda: one.lost and other.lost)
    assert {name for name, _ in one.lost + other.lost} == {"remote"}
    assert all(state in reason for _, reason in one.lost + other.lost)
    remote.process.kill()
    until(lambda: state is State.STARVED or not Path(f"/proc/{remote.watch_pid}").exists())


def test_a_process_whose_agent_is_killed_with_messages_that_it_has_not_read_ends_in_silence():
    ours, theirs = socket.socketpair()
    with theirs, closing(AgentChannel(theirs)) as channel:
        channel.send(sent=1)
        ours.close()
        if not (child := os.fork()):
            try:
                channel.receive()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
