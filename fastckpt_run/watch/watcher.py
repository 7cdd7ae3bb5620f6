"""The watch over a job while it runs: a thread of the agent that looks at it each second, and that nobody waits for."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.rendezvous import RendezvousHandler

from fastckpt._core.config import Settings
from fastckpt._core.policy.stragglers import SlowRank
from fastckpt._core.saver.peers.peer_round import PeerRound
from fastckpt._core.saver.server import Saver
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler
from fastckpt_run.stragglers.straggler_watch import StragglerWatch
from fastckpt_run.watch.http_server import HttpServer, Page
from fastckpt_run.watch.job_actions import JobActions
from fastckpt_run.watch.job_watch import JobWatch
from fastckpt_run.watch.node_channel import NodeChannel
from fastckpt_run.watch.node_status import STATUS, NodeStatus

logger = logging.getLogger("fastckpt.launcher")

INTERVAL = 1.0
"""Seconds between two looks."""
LAST = 2.0
"""Seconds that the end of the agent waits for the thread."""


@dataclass(frozen=True)
class WatchedWorkers:
    """The workers of this node in one round.

    Attributes:
        since: Time of their start, in nanoseconds of the monotonic clock: telemetry that is older is not theirs.
        pids: Their processes, by local rank.
        ranks: Their ranks in the job, by local rank.
        world_size: Number of ranks of all nodes.
    """

    since: int
    pids: dict[int, int]
    ranks: dict[int, int]
    world_size: int


class Watcher:
    """Looks at the job once a second, and serves its observations, if the user wants that.

    Args:
        settings: Settings of the job.
        saver: Has the telemetry of the workers, and serves the agents of other nodes.
        lines: Events of this launch so far; only ever grows.
        handler: That of the rendezvous, by which hosts are drained.

    Attributes:
        stragglers: The watch for slow ranks; None if the user wants none.
    """

    def __init__(self, settings: Settings, saver: Saver, lines: Sequence[bytes], handler: RendezvousHandler) -> None:
        self._settings, self._saver = settings, saver
        self._looks: list[Callable[[], None]] = []
        self._pages: dict[tuple[str, str], Page] = {}
        self._server: HttpServer | None = None
        self._failed: set[str] = set()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastckpt-watch", daemon=True)
        self.channel = NodeChannel(saver)
        self.workers = WatchedWorkers(0, {}, {}, 0)
        ours = handler if isinstance(handler, FastckptRendezvousHandler) else None
        self._links = ours.links if ours else None
        self._actions, self._lines = JobActions(self.channel, saver, ours.host_drain() if ours else None), lines
        status = NodeStatus(saver, lambda: self.workers)
        self.channel.answer(STATUS, lambda sender, body: status.read())
        self.job = JobWatch(settings, saver, lambda: self.workers.ranks)
        self._looks.append(self.job.look)
        self.stragglers: StragglerWatch | None = None
        if settings.slow_ranks:
            self.stragglers = StragglerWatch(saver, self.channel, lambda: self.workers)
            self._looks.append(self.stragglers.look)

    @property
    def url(self) -> str:
        """URL of the live page for a browser on this machine; empty if it is not served."""
        return self._server.url if self._server else ""

    def begin(self) -> None:
        """Begin to look, and to serve; raises ConfigError if it cannot serve or write where it should."""
        self.job.begin()
        if self._settings.metrics_port:
            # Imported here: most jobs serve nothing, and need not wait for it.
            from fastckpt_run.watch.live_page import LivePage

            live = LivePage(self.channel, self._saver, self._actions, self._lines, self._slow, self._links)
            self._pages |= self.job.pages() | live.pages
            self._looks.append(live.rest)
            self._server = HttpServer(self._settings.metrics_port, self._pages)
            logger.warning("serving metrics at %s/metrics", self._server.url)
            live.serve_at(self._server.host, self._server.url)
        self._thread.start()

    def _slow(self) -> Mapping[int, SlowRank]:
        return self.stragglers.slow if self.stragglers else {}

    def meet(self, round: PeerRound) -> None:
        """Take note of a new round of several nodes, or of one that follows one."""
        self.channel.meet(round)

    def started(self, pids: dict[int, int], workers: Sequence[Worker]) -> None:
        """Look at new workers of this node; their processes are given by local rank."""
        ranks = {worker.local_rank: worker.global_rank for worker in workers}
        self.workers = WatchedWorkers(time.monotonic_ns(), dict(pids), ranks, workers[0].world_size)

    def close(self, outcome: str) -> None:
        """Look no more, and serve nobody: the launch ends with this outcome."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(LAST)
        self._attempt(partial(self.job.end, outcome), "JobWatch.end")
        if self._server is not None:
            self._server.close()
        self.channel.close()

    def _run(self) -> None:
        while not self._ends.wait(INTERVAL):
            for look in self._looks:
                self._attempt(look, look.__qualname__)

    def _attempt(self, what: Callable[[], None], name: str) -> None:
        try:
            what()
        # A watch never ends the job, nor keeps others from watching.
        except Exception:
            if name not in self._failed:
                logger.warning("watching the job failed in %s; the job goes on", name, exc_info=True)
            self._failed.add(name)
