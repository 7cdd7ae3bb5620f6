"""Agents of a rendezvous as threads of one process, over real stores."""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from fastckpt_run.rendezvous.endpoints import Endpoints
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler
from fastckpt_run.rendezvous.meeting import Timing
from fastckpt_run.rendezvous.membership import NodeLimits
from tests.support.ports import free_port
from tests.support.waits import DEADLINE as PATIENCE
from tests.support.waits import until as until


def in_thread(call: Callable[[], object]) -> "Future[object]":
    """The result of a call in a thread of its own, which may never come."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Agents:
    """The agents of a job, each with a handler of its own.

    Attributes:
        endpoint: Where the store is.
        calls: The calls of stores by all agents.
    """

    def __init__(
        self,
        fewest: int = 1,
        most: int = 1,
        *,
        last_call: float = 0.5,
        endpoint: str = "",
        spares: int = 0,
        exclude_after: int = 0,
        **timing: float,
    ) -> None:
        self.endpoint = endpoint or places(1)
        self.limits = NodeLimits(fewest, most, last_call, spares, exclude_after)
        self.timing = Timing(**{"join": PATIENCE, "connect": 20.0, "interval": 0.1, "silence": 2.0} | timing)
        self.calls: Counter[str] = Counter()
        self.handlers: list[FastckptRendezvousHandler] = []

    def new(
        self,
        *,
        job: str = "job",
        address: str = "127.0.0.1",
        secret: bytes | None = None,
        host: bool | None = None,
        here: str = "",
    ) -> FastckptRendezvousHandler:
        """An agent that has connected, and has met nobody yet; its host has all names, or that of ``here`` alone."""
        endpoints = Endpoints(self.endpoint, is_here=lambda name: here in ("", name), is_host=host, calls=self.calls)
        made = FastckptRendezvousHandler(
            job, endpoints, self.limits, self.timing, local_address=address, secret=secret, calls=self.calls
        )
        self.handlers.append(made)
        made._connect()
        return made

    def several(self, count: int) -> list[FastckptRendezvousHandler]:
        first = self.new()
        futures = [in_thread(self.new) for _ in range(count - 1)]
        return [first, *(future.result(PATIENCE) for future in futures)]  # type: ignore[list-item]

    def stranger(self) -> TCPStore:
        """A client of the store that belongs to no agent."""
        host, port = self.endpoint.rsplit(":", 1)
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False)

    def close(self) -> None:
        for handler in reversed(self.handlers):
            handler.leave()
        self.handlers.clear()
        gc.collect()  # what errors have kept, such as the stores that they came through


def meet(handlers: list[FastckptRendezvousHandler]) -> list[RendezvousInfo]:
    futures = [in_thread(handler.next_rendezvous) for handler in handlers]
    return [future.result(PATIENCE) for future in futures]  # type: ignore[misc]


def ranks(handlers: list[FastckptRendezvousHandler]) -> list[int]:
    return [handler.round.ranks[handler.id] for handler in handlers]


def kill(handler: FastckptRendezvousHandler) -> None:
    """End an agent as if its process had been killed: no farewell, no sign of life, and its store is gone."""
    handler._alive.stop()
    records = handler._alive.pause()
    handler._alive.give_up()
    if records is not None:
        records.leave()
    handler._master = handler._endpoints.server = None


def ended(nodes: list[FastckptRendezvousHandler]) -> None:
    until(lambda: all(node.num_nodes_waiting() for node in nodes), "the round ends")


def join(newcomer: FastckptRendezvousHandler, members: list[FastckptRendezvousHandler]) -> None:
    joined = in_thread(newcomer.next_rendezvous)
    ended(members)
    meet(members)
    joined.result(PATIENCE)


@contextmanager
def agents(*arguments: int, **options: Any) -> Iterator[Agents]:
    made = Agents(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def places(count: int) -> str:
    """Endpoints of so many stores."""
    return ",".join(f"127.0.0.1:{free_port()}" for _ in range(count))


@contextmanager
def guests(count: int, *arguments: int, **options: Any) -> Iterator[tuple[Agents, list[FastckptRendezvousHandler]]]:
    """A job, by ranks, whose first store is held by none of its nodes: whoever holds it would stay."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with agents(*arguments, endpoint=f"127.0.0.1:{store.port}", **options) as job:
        nodes = [job.new(host=False) for _ in range(count)]
        meet(nodes)
        yield job, by_rank(nodes)


def by_rank(nodes: list[FastckptRendezvousHandler]) -> list[FastckptRendezvousHandler]:
    return sorted(nodes, key=lambda node: node.round.ranks[node.id])


@contextmanager
def met(
    count: int, fewest: int = 1, most: int = 0, **options: Any
) -> Iterator[tuple[Agents, list[FastckptRendezvousHandler]]]:
    with agents(fewest, most or count, **options) as job:
        nodes = job.several(count)
        meet(nodes)
        yield job, nodes
