"""One line on stderr for each restart: the failure and the resumed checkpoint; for a lost job, the failure."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.error_codes import coded
from fastckpt._core.report.goodput_meter import GoodputMeter
from fastckpt._core.report.launches import AwaitedRank, Failure
from fastckpt_run import formatting
from fastckpt_run.failures.cause import Cause

logger = logging.getLogger("fastckpt.launcher")

PATIENCE = 10.0
"""Seconds after which a restart is logged though no worker of this job has ever had a checkpointer."""
_NAMED = 3
"""Workers that failed at the same time and are named, at most."""
ELSEWHERE = "workers were stopped for another node, which failed or joined"


@dataclass
class _Round:
    """The events of one generation of workers; instants are nanoseconds of the monotonic clock."""

    started: int = 0
    size: int = 0
    trains: bool = False
    joined: set[int] = field(default_factory=set)
    loads: dict[str, dict[int, tuple[int, int, str]]] = field(default_factory=dict)

    def observe(self, event: dict[str, Any], at: int) -> None:
        """Take note of an event of this generation."""
        match event["event"]:
            case "workers_started":
                self.started, self.size = at, len(event["pids"])
            case "worker_joined":
                self.joined.add(event["local_rank"])
            case "resumed" | "started_fresh":
                ranks = self.loads.setdefault(event["directory"], {})
                ranks.setdefault(event["local_rank"], (at, event.get("step", -1), event.get("tier", "")))
            case "first_step":
                self.trains = True

    @property
    def loaded(self) -> set[int]:
        """The local ranks that have loaded, or know that there is nothing to load."""
        return {rank for ranks in self.loads.values() for rank in ranks}


@dataclass
class _Pending:
    """A restart that is not logged yet."""

    what: str
    at: int
    left: int
    killed: bool = False


class RestartNotice:
    """Observes the events of this process, and logs a restart when its workers have their state, or are gone again.

    The meter counts the steps that are repeated: the report will read the same events by the same code.

    Attributes:
        newest: End of the workers of this round, in words: their failure, or that they have finished.
    """

    def __init__(self, limit: int) -> None:
        """``limit`` is the value of --max-restarts."""
        self.newest = ""
        self._limit = limit
        self._pid = os.getpid()
        # Events come from the saver's thread, everything else from the agent's main thread.
        self._lock = threading.Lock()
        self._round, self._meter = _Round(), GoodputMeter()
        self._pending: _Pending | None = None
        self._hang: dict[str, Any] = {}
        self._awaited: AwaitedRank | None = None
        self._failed_at = 0
        self._has_joined = False

    def observe(self, event: dict[str, Any]) -> None:
        """Take note of an event; it may come in any thread."""
        if os.getpid() != self._pid:
            return  # a forked worker: somebody may have had the lock
        at = round(event["monotonic"] * 1e9)
        with self._lock:
            self._meter.follow(event)
            match event["event"]:
                case "rendezvous":  # and not with their start: one may have joined before the last is started
                    self._round, self._hang, self._awaited, self._failed_at = _Round(), {}, None, 0
                    self.newest = ""
                case "worker_died":
                    # The first death is the failure; the others follow from it.
                    self._failed_at = self._failed_at or at
                case "workers_finished":
                    self.newest = "its workers have finished"
                case "hang":
                    self._hang, self._failed_at, self._awaited = event, at, AwaitedRank.of(event)
                case _:
                    self._round.observe(event, at)
            self._has_joined |= bool(self._round.joined)

    def failed(self, culprits: Mapping[int, tuple[int, Cause]], left: int, *, nodes: int, first: str) -> None:
        """Workers of this node have failed.

        Args:
            culprits: By rank: exit code, and why.
            left: Number of restarts left, before this one.
            nodes: Number of nodes in the job.
            first: Event on another node before, in words; empty if none is known.
        """
        self._log("but the workers failed again before they had loaded anything")
        after = max(0, left - 1)
        failures = [self._failure(rank, *why) for rank, why in culprits.items()]
        for one in failures:
            metrics.event(
                "worker_failed",
                rank=one.rank,
                exitcode=one.exitcode,
                exception=one.exception,
                frame=one.frame,
                host=one.host,
                log=one.log,
                restarts_left=after,
                restarts=self._limit,
            )
        before = f"{first}; then " if first else ""
        what, self.newest = (f"{before}{_named(failures, count)}" for count in (nodes, 1))
        if left:
            self._pending = _Pending(what, self._failed_at or time.monotonic_ns(), after, _is_killed(failures))
        else:
            why = "" if self._limit else ": --max-restarts is 0"
            text = coded("%s; not restarted%s (%s)", "FC-027")
            logger.error(text, what, why, "; ".join(map(formatting.where, failures[:_NAMED])))

    def interrupted(self, left: int) -> None:
        """Workers that run are to be restarted for the sake of another node."""
        self._log("but the workers were stopped again before they had loaded anything")
        self._pending = _Pending(ELSEWHERE, time.monotonic_ns(), left)

    def look(self, left: int) -> None:
        """Log the last restart if it is due and was not logged; ``left`` is how many more there may be."""
        if self._pending is not None and self._is_due():
            self._pending.left = left
            self._log()

    def end(self) -> None:
        """The job ends."""
        self._log()

    def _is_due(self) -> bool:
        now = self._round
        if now.started < (self._pending.at if self._pending else 0):
            return False
        if not self._has_joined:
            return time.monotonic_ns() - now.started > PATIENCE * 1e9
        return now.trains or len(now.loaded) >= now.size or (bool(now.loaded) and now.joined <= now.loaded)

    def _log(self, otherwise: str = "") -> None:
        """Log the pending restart, if there is one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._lock:
            loads = self._round.loads
            shown = self._meter.directory if self._meter.directory in loads else next(iter(loads), "")
            ranks = loads.get(shown, {})
            repeated = self._meter.measure(time.monotonic_ns(), directory=shown).repeats if ranks else 0
            started = self._round.started if self._round.started > pending.at else 0
        at, step, tier = max(ranks.values(), default=(started, -1, ""))
        seconds = max(0, at - pending.at) / 1e9
        if not started:
            how = "the job ended before they were started again"
        elif not ranks:
            how = ", ".join(filter(None, [f"restarted after {seconds:.1f} s", otherwise]))
        else:
            how = f"resumed step {step} from {tier}" if tier else "started fresh, as there was nothing to resume,"
            how += f" after {seconds:.1f} s, {formatting.count(repeated, 'step') if repeated else 'no step'} repeated"
        text = f"{pending.what}; {how}, {pending.left} of {self._limit} restarts left"
        logger.warning("%s", coded(text, "FC-030") if pending.killed else text)
        metrics.event(
            "restarted",
            text=text,
            seconds=seconds,
            step=step,
            tier=tier,
            repeated=repeated,
            restarts_left=pending.left,
            restarts=self._limit,
        )

    def _failure(self, rank: int, exitcode: int, cause: Cause) -> Failure:
        hung = rank in self._hang.get("culprits", ())
        place = next((str(one["place"]) for one in self._hang.get("ranks", ()) if one["rank"] == rank), "")
        return Failure(
            self._failed_at,
            "hung" if hung else "died",
            rank,
            exitcode,
            round(1e9 * self._hang["silent"]) if hung else 0,
            self._awaited if hung else None,
            exception=cause.exception,
            frame=place if hung else cause.frame,
            host=socket.gethostname(),
            log=cause.log,
        )


def _is_killed(failures: Sequence[Failure]) -> bool:
    """Return whether something else has killed a worker: most often the kernel, for lack of memory."""
    return any(one.kind == "died" and one.exitcode == -signal.SIGKILL for one in failures)


def _named(failures: Iterable[Failure], nodes: int) -> str:
    """The workers that failed, in words; where, too, if there are several nodes."""
    names = [formatting.what(one, host=one.host if nodes > 1 else "") for one in failures]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more
