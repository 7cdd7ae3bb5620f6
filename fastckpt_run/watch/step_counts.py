"""Counts of a node's steps that outlive its workers: a worker's part is kept when it is restarted."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fastckpt._core.memory.telemetry import STEP_BOUNDS, Telemetry
from fastckpt_run.watch.metric_values import StepHistogram

LOOKS = 10
"""Looks back over which the mean of a part is taken."""


@dataclass
class _Worker:
    """Observations of one local rank.

    Attributes:
        directory: The one of its checkpointers that is counted: they count the same steps.
        last: Its last telemetry.
        recent: The number of steps and the times of parts in the last looks.
        parts: Seconds per step of each part, as of the last steps.
    """

    directory: str
    last: Telemetry
    recent: deque[tuple[int, tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=LOOKS + 1))
    parts: tuple[float, ...] = ()


class StepCounts:
    """Durations of steps of all workers since the agent began, and the parts of the last ones; in any thread."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._counts = [0] * (len(STEP_BOUNDS) + 1)
        self._total = 0
        self._lock = threading.Lock()

    def look(self, telemetry: Mapping[str, Sequence[Telemetry]]) -> None:
        """See how far the workers are, by checkpoint directory and local rank."""
        with self._lock:
            for local_rank in range(max(map(len, telemetry.values()), default=0)):
                found = {name: ranks[local_rank] for name, ranks in telemetry.items() if len(ranks) > local_rank}
                self._look(local_rank, {name: last for name, last in found.items() if last.beat})

    def _look(self, local_rank: int, found: Mapping[str, Telemetry]) -> None:
        worker = self._workers.get(local_rank)
        now = found.get(worker.directory) if worker is not None else None
        if worker is not None and now is not None and _is_same(worker.last, now):
            self._add(worker.last, now)
            worker.last = now
            found = {name: last for name, last in found.items() if _follows(now, last)}
        if found:
            name = max(found, key=lambda name: (found[name].generation, bool(found[name].pid), found[name].beat))
            # Another checkpointer of a process that goes on has counted with the first one until that was closed.
            goes_on = worker is not None and found[name].generation == worker.last.generation
            self._add(found[name] if goes_on else Telemetry(), found[name])
            worker = self._workers[local_rank] = _Worker(name, found[name])
        if worker is not None:
            _measure(worker)

    def _add(self, before: Telemetry, last: Telemetry) -> None:
        for bucket, (old, new) in enumerate(zip(before.durations, last.durations, strict=True)):
            self._counts[bucket] += max(0, new - old)
        self._total += max(0, last.stepping - before.stepping)

    @property
    def histogram(self) -> StepHistogram:
        """The durations of all steps."""
        with self._lock:
            return StepHistogram(STEP_BOUNDS, tuple(self._counts), self._total / 1e9)

    def parts(self, local_rank: int) -> tuple[float, ...]:
        """Seconds per step that a worker has lately spent in each part, as of `PARTS`; empty if unknown."""
        with self._lock:
            worker = self._workers.get(local_rank)
            return worker.parts if worker else ()


def _is_same(before: Telemetry, now: Telemetry) -> bool:
    """Return whether two looks are at one process: one that has deregistered has no pid any more."""
    return now.generation == before.generation and now.steps >= before.steps


def _follows(now: Telemetry, other: Telemetry) -> bool:
    """Return whether another checkpointer is to be counted from now on: of a restarted worker, or of one left open."""
    return other.generation > now.generation or (not now.pid and bool(other.pid) and other.generation == now.generation)


def _measure(worker: _Worker) -> None:
    last, recent = worker.last, worker.recent
    recent.append((last.steps, last.parts))
    steps, parts = recent[0]
    done = last.steps - steps
    if done > 0 and any(last.parts):
        worker.parts = tuple((new - old) / done / 1e9 for old, new in zip(parts, last.parts, strict=True))
