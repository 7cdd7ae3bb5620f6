"""The watch for hangs, over real lines of telemetry and real processes."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core.memory.telemetry import Telemetry, TelemetryBlock, telemetry_name, unlink
from fastckpt_run.hangs import process_activity
from fastckpt_run.hangs.detector import HangWatch
from fastckpt_run.hangs.process_activity import Activity, processor_times, state_of

TIMEOUT = 0.3
LONGER = 0.15
"""How much longer than its limit a test waits to see that nothing happens."""


def python(program: str, **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program], start_new_session=True, **streams)


class Node:
    """Two processes that do nothing, whose lines the test writes, and the watch over them."""

    def __init__(self, arena: Path, setting: str | float) -> None:
        self.block = TelemetryBlock(telemetry_name(arena), 2)
        self.other = TelemetryBlock(telemetry_name(arena.with_name("other")), 2)
        self.watch = HangWatch(str(setting), self.read)
        self.workers = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
        self.lines = [self.block.line(rank) for rank in range(2)]
        self.start()

    def read(self) -> dict[str, list[Telemetry]]:
        return {block.name: [block.read(rank) for rank in range(2)] for block in (self.block, self.other)}

    def start(self) -> None:
        ranks = [Worker(rank, global_rank=rank, world_size=2) for rank in range(2)]
        self.watch.started({rank: worker.pid for rank, worker in enumerate(self.workers)}, ranks)

    def replace(self, rank: int, worker: "subprocess.Popen[bytes]") -> None:
        """Start again, with this process as a rank."""
        self.workers[rank].kill()
        self.workers[rank].wait()
        self.workers[rank] = worker
        self.start()

    def train(self, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.lines[rank].begin(0, self.workers[rank].pid, 0)
            self.lines[rank].step()

    def hangs(self) -> bool:
        return self.watch.end_hang(may_restart=True)

    def hangs_within(self, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            meanwhile()
            if self.hangs():
                return True
            time.sleep(0.01)
        return False

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()
        for block in (self.block, self.other):
            block.close()
            unlink(block.name)


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    node = Node(tmp_path / "arena", getattr(request, "param", TIMEOUT))
    yield node
    node.end()


def test_a_rank_whose_training_child_has_ended_does_not_count_as_hung(node: Node):
    node.train()
    training = subprocess.Popen(["sleep", "600"])
    node.lines[0].begin(0, training.pid, 0)
    node.lines[0].step()
    node.lines[1].leave()
    training.kill()
    training.wait()
    assert not node.hangs_within(TIMEOUT + LONGER)


def test_reports_of_former_workers_do_not_count_for_new_ones(node: Node):
    node.train()
    assert not node.hangs()
    time.sleep(TIMEOUT)
    node.watch.killed.add(node.workers[0].pid)
    node.start()
    assert node.watch.killed == set(), "that number may be another's now"
    assert not node.hangs_within(TIMEOUT + LONGER), "they may take long to begin"
    node.train(0)
    assert not node.hangs_within(TIMEOUT + LONGER), "and so may one for which the other waits"


def test_a_worker_under_a_debugger_is_not_killed(node: Node):
    stops = (
        "import ctypes, os, signal, time; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    node.replace(1, traced := python(f"{stops}\ntime.sleep(600)"))
    os.waitpid(traced.pid, 0)  # it has stopped, for this process to look at
    node.train()
    assert state_of(traced.pid) == "t"
    assert not node.hangs_within(TIMEOUT + LONGER)
    ctypes.CDLL(None).ptrace(17, traced.pid, 0, 0)
    assert not node.hangs(), "when it is let go, nor is it at once"
    assert node.hangs_within(60)


def test_a_worker_at_a_prompt_of_pdb_is_not_killed(node: Node):
    offers = (
        "import pdb; from fastckpt._core.memory.stacks import offer; print(offer(), flush=True); pdb.set_trace()\n1"
    )
    node.replace(0, worker := python(offers, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert worker.stdout is not None
    token = int(worker.stdout.readline())
    assert worker.stdout.read(1) == b">", "the prompt"
    node.lines[0].begin(0, worker.pid, token)
    node.lines[0].step()
    assert not node.hangs_within(TIMEOUT + 2.0)


def test_a_second_checkpointer_reports_for_a_worker_that_closed_the_first(node: Node):
    node.train()
    second = node.other.line(1)
    second.begin(0, node.workers[1].pid, 0)
    node.lines[1].leave()
    assert not node.hangs_within(TIMEOUT + LONGER, meanwhile=lambda: (node.lines[0].step(), second.step()))
    assert node.hangs_within(60, meanwhile=node.lines[0].step)
    assert node.workers[1].wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("node", [0.1], indirect=True)
def test_a_restarted_rank_that_had_closed_its_checkpointer_needs_none(node: Node):
    node.train()
    assert not node.hangs()
    node.lines[0].leave()
    node.lines[1].leave()
    assert not node.hangs()
    node.start()
    assert not node.hangs_within(1.0 + LONGER)
    node.train()
    assert node.hangs_within(60)


WORK = {
    "a slow transfer": """
import os, time
there, here = os.pipe()
while True:
    os.read(there, os.write(here, bytes(4000)))
    time.sleep(0.1)
""",
    "a child in a session of its own": """
import subprocess, sys
subprocess.run([sys.executable, '-c', 'while True: pass'], start_new_session=True)
""",
}


def is_idle_once(watched: Activity, began: float) -> bool:
    """Whether a process is taken for idle at one of several looks."""
    return any(watched.idle(time.monotonic(), began) > 0.9 for _ in range(12) if not time.sleep(0.1))


@pytest.mark.parametrize("program", WORK.values(), ids=WORK)
def test_activity_distinguishes_working_from_waiting_processes(monkeypatch: pytest.MonkeyPatch, program: str):
    monkeypatch.setattr(process_activity, "_WINDOW", 0.3)
    worker = python(program)
    try:
        end = time.monotonic() + 60
        time.sleep(0.5)  # it starts
        began = time.monotonic()
        watched = Activity([worker.pid], began)
        assert not is_idle_once(watched, began)
        for process in (worker, *psutil.Process(worker.pid).children(recursive=True)):
            os.kill(process.pid, signal.SIGSTOP)
        while watched.idle(time.monotonic(), began) < 0.6:
            assert time.monotonic() < end
            time.sleep(0.05)
        spoken = time.monotonic()
        assert watched.idle(spoken, spoken) == 0
        assert processor_times([worker.pid, 1]).keys() == {worker.pid, 1}
    finally:
        for process in psutil.Process(worker.pid).children(recursive=True):
            process.kill()
        worker.kill()
        worker.wait()


def test_a_process_that_is_not_scheduled_is_not_idle(monkeypatch: pytest.MonkeyPatch):
    """A machine may be so busy that a process of the lowest rank hardly runs."""
    monkeypatch.setattr(process_activity, "_WINDOW", 0.1)
    one = min(os.sched_getaffinity(0))
    hog = f"import os; os.sched_setaffinity(0, [{one}]); print(flush=True)\nwhile True: pass"
    meek = hog.replace("print", "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); print")
    processes = []
    try:
        for program in (meek, hog, hog):  # of one session, or the kernel would give each session as much as the others
            processes.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE))
            assert processes[-1].stdout is not None and processes[-1].stdout.readline()
        began = time.monotonic()
        assert not is_idle_once(Activity([processes[0].pid], began), began)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
