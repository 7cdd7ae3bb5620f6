"""Agents of a job that hangs, in one process: real savers and channels, and a real worker of each that is caught."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core.memory.telemetry import TelemetryBlock, telemetry_name, unlink
from fastckpt_run.hangs.detector import HangWatch
from fastckpt_run.hangs.process_activity import state_of
from tests.support.waits import until
from tests.unit.fastckpt_run.watch.test_node_channel import SECRET as SECRET
from tests.unit.fastckpt_run.watch.test_node_channel import Agents

WAITS, SPINS = "all_reduce()", "all_reduce(spins=True)"
LOOPS, SLEEPS = "while True: pass", "while True: time.sleep(60)"
EXECS, EXITS = 'os.execvp("sleep", ["sleep", "600"])', "os._exit(0)"
COMPUTES = "for step in itertools.count(): deeper(step % 97)"
PRINTS = 'while True: sys.stdout.write("x" * 65536)'
_PROGRAM = """
import itertools, os, sys, threading, time
from fastckpt._core.memory.stacks import offer
lock = threading.Lock()
lock.acquire()
collective = "def all_reduce(spins=False):\\n    while spins: pass\\n    lock.acquire()"
exec(compile(collective, "/site-packages/torch/distributed/distributed_c10d.py", "exec"))
def deeper(depth):
    if depth:
        return deeper(depth - 1)
    end = time.monotonic() + 0.02
    while time.monotonic() < end: pass
sys.stdout.write(f"{offer()}\\n")
sys.stdout.flush()
def train():
    """


class CaughtWorker:
    """A process that is caught in `train` of a program, and offers its stacks."""

    def __init__(self, program: str) -> None:
        # Named, as a script is: what is compiled from a text has the same name everywhere.
        program = f"{_PROGRAM}{program}\ntrain()"
        text = f"exec(compile({program!r}, '/job/train.py', 'exec'))"
        self._process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True)
        self.pid, self.stacks = self._process.pid, int(self._process.stdout.readline())

    def wait_until_caught(self) -> None:
        """Wait until it is in `train`, as far as can be seen: it does not run, or runs for long."""
        stat = Path(f"/proc/{self.pid}/stat")
        until(lambda: (now := stat.read_text().rpartition(")")[2].split())[0] != "R" or int(now[11]) > 10)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: state_of(self.pid) == "T")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class HungNode:
    def __init__(self, number: int, worker: CaughtWorker, agents: Agents, block: TelemetryBlock) -> None:
        self.number, self.worker, self.line = number, worker, block.line(0)
        self.saver, self.channel = agents.savers[number], agents.channels[number]
        self.watch = HangWatch("600", lambda: {"run": [block.read(0)]}, self.channel)
        self.watch._host = f"host{number}"  # they would all have the name of this one

    def start(self, world: int) -> None:
        """Its worker has just been started, and has done a step."""
        self.watch.started({0: self.worker.pid}, [Worker(0, global_rank=self.number, world_size=world)])
        self.line.begin(0, self.worker.pid, self.worker.stacks)
        self.line.step()
        self.watch.end_hang(may_restart=True)  # the first look

    def collect(self, silent: float = 0.0, lately: float = 0.0):
        return self.watch._exchange.collect(f"host{self.number}", silent, lately)


class HungJob:
    def __init__(self, workers: list[CaughtWorker], folder: Path, stack: contextlib.ExitStack) -> None:
        agents = Agents(len(workers), stack)
        self.peers, self.meet, self.nodes = agents.peers, agents.meet, list[HungNode]()
        for number, worker in enumerate(workers):
            block = TelemetryBlock(telemetry_name(folder / f"arena-{number}"), 1)
            stack.callback(unlink, block.name)
            stack.callback(block.close)
            self.nodes.append(HungNode(number, worker, agents, block))
        self.meet()
        for node in self.nodes:
            node.start(len(workers))

    def counted(self, subject: str) -> list[int]:
        """The nodes that will have been asked about a subject, one entry for each time."""
        asked: list[int] = []
        for node in self.nodes:
            before = node.channel._answers[subject]

            def answer(sender, body, number=node.number, before=before):
                asked.append(number)
                return before(sender, body)

            node.channel.answer(subject, answer)
        return asked
