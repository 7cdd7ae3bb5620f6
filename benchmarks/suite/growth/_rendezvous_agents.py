"""Agents of a rendezvous: threads of several processes, each with its own clients of one store.

The first process holds the store. Messages are calls of it. "first" is a round that all join at once, once all are
connected; "later" is the one after it, which the last agent starts by coming again. All give signs of life at the
product's interval, which are counted separately, and then hold the round, in which none may expire.
"""

import itertools
import multiprocessing
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastckpt_run.rendezvous.endpoints import Endpoints
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler
from fastckpt_run.rendezvous.meeting import Timing
from fastckpt_run.rendezvous.membership import NodeLimits
from fastckpt_run.rendezvous.round_store import RoundStore
from tests.support.ports import free_port

IN_A_PROCESS = 64
WATCHED = 10.0
"""Seconds for which a round is held."""
SECRET = b"a secret of thirty-two characters"
beats = Counter[str]()


class Agents:
    """The agents of one process."""

    def __init__(self, numbers: range, world: int, port: int) -> None:
        self.calls = Counter[str]()
        limits = NodeLimits(world, world)
        self.handlers = [
            FastckptRendezvousHandler(
                "benchmark",
                Endpoints(
                    f"127.0.0.1:{port}", is_here=lambda _: True, is_host=None if number == 0 else False,
                    calls=self.calls,
                ),
                limits, Timing(), local_address="127.0.0.1", secret=SECRET, calls=self.calls,
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


def process(numbers: range, world: int, port: int, gate: Any, results: Any) -> None:
    """Agents of one process."""
    count_beats()
    sys.setswitchinterval(0.05)  # each thread that waits for the interpreter wakes up that often
    agents = Agents(numbers, world, port)

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
    held = phase(lambda: time.sleep(WATCHED))
    expired = sum(each.num_nodes_waiting() > 0 for each in agents.handlers)
    assert all(len(each.round.nodes) == world for each in agents.handlers)
    results.put((connect, first, later, held, expired))
    gate.wait()
    agents.each(lambda each: each.leave())


def rendezvous(world: int) -> dict[str, float]:
    """Seconds and messages of an agent."""
    more_files()
    context = multiprocessing.get_context("fork")
    bounds = [*range(0, world, IN_A_PROCESS), world]
    gate, results = context.Barrier(len(bounds)), context.SimpleQueue()
    port = free_port()
    children = [
        context.Process(target=process, args=(range(*pair), world, port, gate, results))
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
    messages = [sum(each[number][0] - each[number][1] for each in found) / world for number in (1, 2)]
    expired = sum(each[4] for each in found)
    return {"first": seconds[1], "later": seconds[2], "messages": max(messages), "expired": float(expired)}


def more_files() -> None:
    """Permit as many open files as the kernel does."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
