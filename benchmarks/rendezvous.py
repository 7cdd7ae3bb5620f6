"""Measures a rendezvous of many agents: seconds and messages, and whether agents that live are taken for gone.

    python benchmarks/rendezvous.py [--agents 64 256 1024] [--in-a-process 64] [--watched 10]

Agents are threads of several processes, each with its own clients of one store, as agents of a job have; the first
process holds the store. Messages are calls of that store, counted by the agents. "first" is a round that all join at
once, from the moment at which all are connected; "later" is the one after it, which the last agent starts by coming
again. Each gives signs of life all the while at the product's interval, which are counted separately; then all hold
the round for --watched seconds, in which none may expire at the product's 2 s of silence.
"""

import argparse
import itertools
import multiprocessing
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fastckpt_run.rendezvous.endpoints import Endpoints
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler
from fastckpt_run.rendezvous.meeting import Timing
from fastckpt_run.rendezvous.membership import NodeLimits
from fastckpt_run.rendezvous.round_store import RoundStore
from tests.support.ports import free_port

beats = Counter[str]()


class Agents:
    """The agents of one process."""

    def __init__(self, numbers: range, world: int, port: int, secret: bytes) -> None:
        self.calls = Counter[str]()
        limits = NodeLimits(world, world)
        self.handlers = [
            FastckptRendezvousHandler(
                "benchmark",
                Endpoints(
                    f"127.0.0.1:{port}", is_here=lambda _: True, is_host=None if number == 0 else False,
                    calls=self.calls,
                ),
                limits, Timing(), local_address="127.0.0.1", secret=secret, calls=self.calls,
            )
            for number in numbers
        ]  # fmt: skip
        for number, handler in zip(numbers, self.handlers, strict=True):
            handler._me = handler._me._replace(host=f"host-{number}")  # as if each were alone on a host

    def each(self, act: Callable[[FastckptRendezvousHandler], object]) -> None:
        """Have all agents do something at once."""
        threads = [threading.Thread(target=act, args=(handler,)) for handler in self.handlers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def count_beats() -> None:
    """Count signs of life and looks at them apart from the other calls."""
    for name in ("beat", "beats"):
        plain = getattr(RoundStore, name)

        def counted(self: RoundStore, *arguments: Any, plain: Callable[..., Any] = plain) -> Any:
            before = self.connection.calls.total()
            try:
                return plain(self, *arguments)
            finally:  # of several threads that count at once: near enough
                beats["calls"] += 1
                beats["messages"] += max(1, min(2, self.connection.calls.total() - before))

        setattr(RoundStore, name, counted)


def process(numbers: range, world: int, port: int, watched: float, gate: Any, results: Any) -> None:
    """Agents of one process."""
    count_beats()
    sys.setswitchinterval(0.05)  # each thread that waits for the interpreter wakes up that often
    agents = Agents(numbers, world, port, b"a secret of thirty-two characters")

    def phase(act: Callable[[], object]) -> tuple[int, int]:
        gate.wait()
        calls, signs = agents.calls.total(), beats["messages"]
        act()
        gate.wait()
        return agents.calls.total() - calls, beats["messages"] - signs

    if numbers.start == 0:
        agents.handlers[0]._connect()
    connect = phase(lambda: agents.each(lambda each: each._connect()))
    first = phase(lambda: agents.each(lambda each: each.next_rendezvous()))
    later = phase(lambda: agents.each(lambda each: each.next_rendezvous()))
    held = phase(lambda: time.sleep(watched))
    expired = sum(each.num_nodes_waiting() > 0 for each in agents.handlers)
    assert all(len(each.round.nodes) == world for each in agents.handlers)
    results.put((connect, first, later, held, expired))
    gate.wait()
    agents.each(lambda each: each.leave())


def measure(world: int, in_a_process: int, watched: float) -> None:
    """Print a row."""
    context = multiprocessing.get_context("fork")
    bounds = [*range(0, world, in_a_process), world]
    gate, results = context.Barrier(len(bounds)), context.SimpleQueue()
    port = free_port()
    children = [
        context.Process(target=process, args=(range(*pair), world, port, watched, gate, results))
        for pair in itertools.pairwise(bounds)
    ]
    for child in children:
        child.start()
    seconds = []
    for _ in range(4):
        gate.wait()
        begin = time.perf_counter()
        gate.wait()
        seconds.append(time.perf_counter() - begin)
    found = [results.get() for _ in children]
    gate.wait()
    for child in children:
        child.join()
    cells = [str(world), f"{seconds[0]:.1f}"]
    for number in (1, 2):
        messages, signs = (sum(each[number][part] for each in found) for part in (0, 1))
        cells += [f"{seconds[number]:.2f}", f"{(messages - signs) / world:.1f}", f"{signs / world:.1f}"]
    cells += [f"{sum(each[3][0] for each in found) / world / watched:.1f}", str(sum(each[4] for each in found))]
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print a row for each number of agents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--in-a-process", type=int, default=64)
    parser.add_argument("--watched", type=float, default=10.0)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    titles = ["agents", "connecting, s"]
    titles += [f"{each} round, {what}" for each in ("first", "later") for what in ("s", "messages an agent", "beats")]
    titles += ["held: messages an agent and second", "expired"]
    print("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    for world in options.agents:
        measure(world, options.in_a_process, options.watched)


if __name__ == "__main__":
    main()
