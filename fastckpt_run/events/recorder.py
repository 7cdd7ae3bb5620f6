"""The agent's record of a job: its course, the progress of its workers, and all other events, in bounded memory."""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec

from fastckpt._core import metrics
from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.report.launches import ACCOUNTED
from fastckpt._core.saver.server import Saver
from fastckpt._core.storage.store import is_url
from fastckpt._core.version import VERSION
from fastckpt_run.events.event_lines import EventLines
from fastckpt_run.events.log_file import EventLog
from fastckpt_run.workers import run_script_path

logger = logging.getLogger("fastckpt.launcher")

INTERVAL = 1.0
"""Seconds from one record of the workers' progress to the next, in a job that is young."""
LOOKS = 1000
"""Records that a job may have each time it grows e times older: a log stays small."""
MOST = 20_000
"""Events of one name that are recorded at most, but for those by which time is accounted for: few for each restart."""
CLOSING = 3.0
"""Seconds that the end of the job waits for the last events to be written."""


class EventRecorder:
    """All events of this process from `begin` to `end`; with ``keep`` they are written to the checkpoint directory."""

    def __init__(self, saver: Saver, *, keep: bool) -> None:
        self._saver = saver
        self._keep = keep
        self._pid = os.getpid()
        self._begun = self._looked = time.monotonic()
        self._started = 0
        self._first: set[int] = set()
        self._group: WorkerGroup | None = None
        self._counts: Counter[str] = Counter()
        self._logs: dict[str, EventLog] = {}
        self._lock = threading.Lock()
        self.lines = EventLines()

    def begin(self, spec: WorkerSpec, page: str = "") -> None:
        """The job begins; its live page is at the URL ``page``, if it has one."""
        metrics.listen(self._record)
        metrics.event(
            "job_started",
            run_id=spec.rdzv_handler.get_run_id(),
            host=socket.gethostname(),
            boot=Process.current().boot,
            version=VERSION,
            script=_name_of(spec),
            local_world_size=spec.local_world_size,
            max_restarts=spec.max_restarts,
            page=page,
        )

    @contextmanager
    def meeting(self, group: WorkerGroup) -> Iterator[None]:
        """The nodes meet."""
        start = time.monotonic()
        yield
        metrics.event(
            "rendezvous",
            seconds=time.monotonic() - start,
            node=group.group_rank,
            nodes=group.group_world_size,
            world_size=group.workers[0].world_size,
            ranks=[worker.global_rank for worker in group.workers],
        )
        self._group, self._started = group, time.monotonic_ns()
        self._first.clear()

    def look(self, *, now: bool = False) -> None:
        """See how far the workers are; record it if it is time to, or if it must be ``now``."""
        time_now = time.monotonic()
        due = now or time_now - self._looked >= max(INTERVAL, (time_now - self._begun) / LOOKS)
        if not (due or self._awaits_first_steps):
            return
        telemetry = self._saver.telemetry()
        for ranks in telemetry.values():
            self._record_first_steps(ranks)
        if due:
            self._looked = time_now
            for directory, ranks in telemetry.items():
                self._record_progress(directory, ranks)

    def end(self, outcome: str) -> None:
        """The job has ended, and a last `look` was taken."""
        dropped = sum(max(0, count - MOST) for name, count in self._counts.items() if name not in ACCOUNTED)
        if dropped:
            metrics.event("events_lost", count=dropped)
        metrics.event("job_ended", outcome=outcome, seconds=time.monotonic() - self._begun)
        metrics.unlisten(self._record)
        end = time.monotonic() + CLOSING
        for directory, log in self._logs.items():
            if not log.close(max(0.0, end - time.monotonic())):
                logger.warning(
                    "the event log in %s is incomplete: storage did not take the last events in time", directory
                )

    def _record(self, event: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            return  # a forked worker: somebody may have had the lock
        with self._lock:
            self._counts[event["event"]] += 1
            if self._counts[event["event"]] > MOST and event["event"] not in ACCOUNTED:
                return
            line = metrics.to_line(event)
            self.lines.append(line)
            for log in self._logs.values():
                log.append(line)
            if self._keep and event["event"] == "worker_joined":
                self._open(event["directory"])

    def _open(self, directory: str) -> None:
        if directory not in self._logs and not is_url(directory):
            # With all lines so far: the directory is known only once the first worker has named it.
            self._logs[directory] = EventLog(Path(directory), self.lines)

    @property
    def _awaits_first_steps(self) -> bool:
        """True if a worker has yet to take its first step, which is recorded soon after."""
        return self._group is None or len(self._first) < len(self._group.workers)

    def _record_first_steps(self, ranks: list[Telemetry]) -> None:
        for local_rank, last in enumerate(ranks):
            # The telemetry block outlives workers: a first step from before this start is a predecessor's.
            if last.first > self._started > 0 and local_rank not in self._first:
                self._first.add(local_rank)
                metrics.event(
                    "first_step",
                    local_rank=local_rank,
                    rank=self._rank(local_rank),
                    at=last.first / 1e9,
                    restart_count=last.generation,
                )

    def _rank(self, local_rank: int) -> int:
        assert self._group is not None
        workers = self._group.workers
        return int(workers[local_rank].global_rank) if local_rank < len(workers) else -1

    def _record_progress(self, directory: str, ranks: list[Telemetry]) -> None:
        all_stats = [stats for stats in self._saver.report() if stats.directory == directory]
        progress = [
            {
                "local_rank": local_rank,
                "restart_count": last.generation,
                "step": last.step,
                "named": last.named,
                "loaded": last.loaded,
                "steps": last.steps,
                "stalled": last.stalled / 1e9,
                "beat": last.beat / 1e9,
                "phase": last.phase,
            }
            for local_rank, last in enumerate(ranks)
            if last.beat
        ]
        metrics.event(
            "progress",
            directory=directory,
            ranks=progress,
            saves=sum(stats.saves for stats in all_stats),
            saved_bytes=sum(stats.saved_size for stats in all_stats),
            skipped=sum(stats.skips.total() for stats in all_stats),
            persisted=sum(stats.persisted for stats in all_stats),
            persisted_bytes=sum(stats.size for stats in all_stats),
            persist_seconds=sum(stats.seconds for stats in all_stats),
        )


def outcome_of(result: RunResult | None) -> str:
    """The outcome of a job that ended by itself; without a result, the other nodes had ended it."""
    return "stopped" if result is None else "failed" if result.is_failed() else "succeeded"


def _name_of(spec: WorkerSpec) -> str:
    """The name of the script, of a function, or of a command that is no Python; arguments may be secret."""
    if callable(spec.entrypoint) and spec.entrypoint is not run_script_path:
        return str(getattr(spec.entrypoint, "__qualname__", ""))
    program = "python" if callable(spec.entrypoint) else Path(str(spec.entrypoint)).name
    if not program.startswith("python"):
        return program
    return Path(next((arg for arg in spec.args if isinstance(arg, str) and not arg.startswith("-")), "")).name
