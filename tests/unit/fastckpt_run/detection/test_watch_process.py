"""The process that watches for an agent: it answers while the agent's interpreter does not, and follows the agent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from fastckpt._core import metrics
from fastckpt_run.detection.neighbor_watch import BEAT
from fastckpt_run.detection.probes import State
from fastckpt_run.detection.watch_process import SENT, WatchProcess
from tests.unit.fastckpt_run.detection.test_neighbor_watch import LOOPBACK, SECRET
from tests.unit.fastckpt_run.waits import until

_AGENT = """
import sys, time
from tests.unit.fastckpt_run.detection.test_watch_process import Agent
agent = Agent(sys.argv[1])
print(agent.address, agent.pid, flush=True)
agent.watch([tuple(each.split("=")) for each in input().split()])
while True:
    eval(input())
    print("done", flush=True)
"""
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


class RemoteAgent:
    """A member whose agent is another process."""

    def __init__(self, name: str) -> None:
        self.name = name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", _AGENT, name], text=True, **pipes)
        self.address, pid = self.process.stdout.readline().split()
        self.watch_pid = int(pid)

    def watch(self, members: Sequence[tuple[str, str]]) -> None:
        self._say(" ".join("=".join(each) for each in members))

    def run(self, expression: str) -> None:
        """Evaluate an expression there, to its end."""
        self._say(expression)
        assert self.process.stdout.readline() == "done\n"

    def _say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        with suppress(ProcessLookupError):
            os.kill(self.watch_pid, signal.SIGCONT)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self.process.wait()


@pytest.fixture
def trio() -> Iterator[tuple[Agent, Agent, RemoteAgent]]:
    """Three members that have heard each other: two of this process, and one of another."""
    one, other, remote = Agent("one"), Agent("other"), RemoteAgent("remote")
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
    remote.run(HOLD)
    assert one.answering(["remote", "a stranger"]) == {"remote"}
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
    one.stop()
    assert metrics.counts[SENT] - before >= 3 * 2


@pytest.mark.parametrize("state", [State.FROZEN, State.STARVED, State.GONE], ids=lambda state: state.name)
def test_an_agent_that_is_stopped_or_killed_is_lost_with_its_process_and_told_apart(trio, state):
    """A process that watches, and did not run for a second, blames nobody."""
    one, other, remote = trio
    for _ in range(2):
        os.kill(one.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(one.pid, signal.SIGCONT)
        time.sleep(1.0)
    assert one.lost == other.lost == []
    if state is not State.GONE:
        os.kill(remote.process.pid if state is State.FROZEN else remote.watch_pid, signal.SIGSTOP)
    else:
        remote.process.kill()
    until(lambda: one.lost and other.lost)
    assert {name for name, _ in one.lost + other.lost} == {"remote"}
    assert all(state in reason for _, reason in one.lost + other.lost)
    remote.process.kill()
    until(lambda: state is State.STARVED or not Path(f"/proc/{remote.watch_pid}").exists())
