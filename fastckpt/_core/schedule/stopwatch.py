"""Measures training and its checkpoints on this rank, step by step."""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fastckpt._core.client.heartbeat import Heartbeat, marked
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Status
from fastckpt._core.memory.headroom import processor_quotas
from fastckpt._core.policy.frequency.overhead import Iteration
from fastckpt._core.transfer.host_copy import leaves_none

TICKS = os.sysconf("SC_CLK_TCK")
"""Steps per second in which the kernel counts processor time."""
LEAST = 0.1
"""Seconds of cores, at least, to judge from whether one was idle."""


class ProcessorTime:
    """Processor time of this rank and its part of the saver, in seconds of its part of the node's cores.

    Args:
        saver: The pid of the saver; 0 if it is a thread of a rank.
        ranks: The number of ranks on this node.
    """

    def __init__(self, saver: int, ranks: int) -> None:
        self._saver, self._ranks = saver, ranks
        # Ranks may be bound to cores of their own: the saver has those of all.
        usable = len(_affinity(saver) or _affinity(0))
        self._cores = max(1e-3, min([usable, *processor_quotas()]))
        self._busy, self._before = False, _times()

    def __call__(self) -> float:
        """The seconds so far, without those of this rank in phases that the script has marked as something else."""
        _, elsewhere = marked()
        return (self._ranks * (time.process_time() - elsewhere) + self._of_saver()) / self._cores

    def none_idle(self) -> bool:
        """Return whether hardly a core was idle since the last call, whoever used them."""
        now = _times()
        passed, used = (after - before for after, before in zip(now, self._before, strict=True))
        if passed >= LEAST:
            self._busy, self._before = leaves_none(1, passed, used), now
        return self._busy

    def _of_saver(self) -> float:
        try:
            # The number of another process's clock, as the kernel and clock_getcpuclockid(3) make it of the pid.
            return time.clock_gettime(~self._saver << 3 | 2) if self._saver else 0.0
        except OSError:
            self._saver = 0  # it has ended
            return 0.0


def _times() -> tuple[float, float]:
    """Seconds of the cores that this process may use, and the seconds in which they were used."""
    usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    total = idle = 0
    for name, *ticks in map(str.split, Path("/proc/stat").read_text().splitlines()):
        if name in usable:
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are in that of the user, too
            times = [*map(int, ticks[:8])]
            total, idle = total + sum(times), idle + sum(times[3:5])
    return total / TICKS, (total - idle) / TICKS


def _affinity(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return set()


class Stopwatch:
    """Times of this rank's iterations, and of the persists that were requested.

    Args:
        beats: Knows how long training has stalled.
        glance: Gives the progress of persists.
        processor: Measures the processor time.

    Attributes:
        durations: Seconds of each persist that has ended, from the beginning of its snapshot; their reader clears it.
        overruns: Number of persists that were due while one was under way, and storage was well.
    """

    def __init__(self, beats: Heartbeat, glance: Callable[[], Status | None], processor: ProcessorTime) -> None:
        self.durations: list[float] = []
        self.overruns = 0
        self._beats, self._glance, self.processor = beats, glance, processor
        self._under_way: deque[tuple[SaveId, float]] = deque()
        self._troubled = False
        self._begun = self._stalled = self._marked = self._used = 0.0
        self._had_snapshot = self._had_persist = False

    def turn(self) -> Iteration | None:
        """Note the end of a step, where a checkpoint may begin; returns the iteration since the last turn.

        None for the first one, and for one that cannot be measured.
        """
        now, stalled, (marks, _), used = time.monotonic(), self._beats.stalled, marked(), self.processor()
        seconds, stall = now - self._begun - (marks - self._marked), stalled - self._stalled
        iteration = None
        # Phases that the script marks may contain a stall: then the difference is of no use.
        if self._begun and 0 <= stall <= seconds:
            iteration = Iteration(seconds, stall, self._had_snapshot, self._had_persist, max(0.0, used - self._used))
        self._begun, self._stalled, self._marked, self._had_snapshot = now, stalled, marks, False
        self._used = used
        self._look()
        self._had_persist = bool(self._under_way)
        return iteration

    def saved(self, save: SaveId | None, *, persist: bool) -> None:
        """A snapshot was taken since the last turn, and is to be persisted; None if it was skipped."""
        self._had_snapshot = save is not None
        if save is not None and persist:
            self.overran()
            self._under_way.append((save, self._begun))
            self._had_persist = True

    def overran(self) -> None:
        """Note that a persist is due: an overrun if one is under way."""
        self.overruns += bool(self._under_way) and not self._troubled

    @property
    def idle(self) -> bool:
        """Return whether no persist is under way, as far as is known."""
        return not self._under_way

    def _look(self) -> None:
        """Note which persists have ended. Their durations do not count while storage is in trouble."""
        # None while a save is pending, whose thread uses the connection, and when the saver does not answer.
        status = self._glance() if self._under_way else None
        if status is None:
            return
        durable = SaveId(*status.newest) if status.newest else None
        while self._under_way and durable is not None and self._under_way[0][0] <= durable:
            save, begun = self._under_way.popleft()
            # Only the newest durable save has a time: the saver reports none of saves that it overtook.
            if save == durable and status.since > begun and not self._troubled:
                self.durations.append(status.since - begun)
        if not status.waiting:  # none is under way: those that are not durable now failed or were overtaken
            self._under_way.clear()
        self._troubled = bool(self._under_way and (status.trouble or self._troubled))
