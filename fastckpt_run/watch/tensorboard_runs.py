"""Metrics for TensorBoard, written by a thread of its own: a disk that is full, read-only or hangs delays nobody."""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastckpt._core.report.metric_table import BY_NAME, PREFIX, Labels, Metric
from fastckpt.errors import ConfigError
from fastckpt_run.watch.metric_values import MetricValues, StepHistogram

logger = logging.getLogger("fastckpt.launcher")

INTERVAL = 10.0
"""Seconds between two points of a curve."""
CLOSING = 2.0
"""Seconds that the end of the job waits for the last points."""
PAUSE, LONGEST_PAUSE = 10.0, 300.0
"""Seconds until a directory that cannot be written to is tried again, with a file of its own: longer each time."""
PROBE = 1 << 16
"""Bytes that the disk must take before a point is written."""
WAITING = 8
"""Points that wait for the disk, at most; older ones are lost."""

Point = tuple[int, int, float, MetricValues]
"""A step, the number of restarts, the time, and the values then."""


class TensorBoardRuns:
    """Writes a run for each start of this node's workers: ``<directory>/<time>-<host>-<pid>/start<n>``.

    Args:
        directory: Directory in which TensorBoard looks for runs.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{socket.gethostname()}-{os.getpid()}"
        self._folder = Path(directory) / name
        self._points = deque[Point](maxlen=WAITING)
        self._due = 0.0
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fastckpt-tensorboard", daemon=True)

    def begin(self) -> None:
        """Begin to write; raises ConfigError without the package."""
        if find_spec("tensorboard") is None:
            raise ConfigError(
                f"tensorboard is {self._directory!r}, but the package tensorboard is not installed: install it with "
                "pip install 'tensorboard>=2.16' (--fast-tensorboard, FASTCKPT_TENSORBOARD)"
            )
        self._thread.start()

    def put(self, step: int, restarts: int, values: MetricValues, *, now: bool = False) -> None:
        """Have values written, if it is time for a point, or if they must be written ``now``."""
        if now or time.monotonic() >= self._due:
            self._due = time.monotonic() + INTERVAL
            with self._wake:
                self._points.append((step, restarts, time.time(), values))
                self._wake.notify()

    def close(self) -> None:
        """Have the rest written, for a moment."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(CLOSING)

    def _run(self) -> None:
        run: _Run | None = None
        failures = 0
        while (point := self._next()) is not None:
            try:
                if run is None or run.restarts != point[1]:
                    _close(run)
                    run = _Run(self._folder / f"start{point[1]}", point[1])
                run.write(point)
                failures = 0
            # Errors of the disk, the package and protobuf: the job goes on, without these points.
            except (OSError, RuntimeError, TypeError, ValueError, ImportError) as error:
                _close(run)
                run, failures = None, failures + 1  # its file may be torn: another one follows
                if failures == 1:
                    logger.warning("metrics for TensorBoard are lost: they cannot be written: %s", error)
                with self._wake:
                    self._wake.wait_for(lambda: self._closed, min(PAUSE * failures, LONGEST_PAUSE))
        _close(run)

    def _next(self) -> Point | None:
        with self._wake:
            self._wake.wait_for(lambda: self._points or self._closed)
            return self._points.popleft() if self._points else None


class _Run:
    """One run: a folder with a file of events."""

    def __init__(self, folder: Path, restarts: int) -> None:
        # Here, in the thread that writes: it takes a second to import.
        from torch.utils.tensorboard import SummaryWriter

        self.restarts = restarts
        self._folder = folder
        self._before: dict[str, tuple[int, float]] = {}
        _require_space(folder)
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, point: Point) -> None:
        """Write a point of each curve; raises the package's errors, and OSError if the disk does not take it."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        step, _, at, values = point
        _require_space(self._folder)
        for x, found in self._by_step(step, values).items():
            # All at once: a call for each takes ten times as long.
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in found])
            self._writer.file_writer.add_summary(summary, x, at)
        for name, histogram in values.histograms.items():
            self._add_histogram(name, histogram, step, at)
        self._writer.flush()

    def _by_step(self, step: int, values: MetricValues) -> dict[int, list[tuple[str, float]]]:
        """Tags and values by the step that they are of: a rank's own have that which it gave."""
        steps = {rank: int(of) for (rank,), of in values.series.get(f"{PREFIX}user_step", {}).items()}
        found: dict[int, list[tuple[str, float]]] = {step: []}
        for metric, labels, value in values:
            x = steps.get(labels[-1], step) if metric.group == "user" else step
            found.setdefault(x, []).append((_tag(metric, labels), value))
        for name, steps_ in values.histograms.items():
            tag, count, (done, total) = BY_NAME[name].tag(()), sum(steps_.counts), self._before.get(name, (0, 0.0))
            if count > done:
                found[step].append((f"{tag}/mean", (steps_.total - total) / (count - done)))
                self._before[name] = count, steps_.total
        return found

    def close(self) -> None:
        """End the threads of the writer."""
        for each in self._writer.all_writers.values():
            each.close()

    def _add_histogram(self, name: str, steps: StepHistogram, step: int, at: float) -> None:
        if not (count := sum(steps.counts)):
            return
        tag, largest, square = BY_NAME[name].tag(()), steps.bounds[-1], steps.total**2 / count
        bounds, counts = [*steps.bounds, sys.float_info.max], list(steps.counts)
        self._writer.add_histogram_raw(tag, 0.0, largest, count, steps.total, square, bounds, counts, step, walltime=at)


def _close(run: _Run | None) -> None:
    """Close a run, if there is one; its disk may have failed."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if run is not None:
            run.close()


def _require_space(folder: Path) -> None:
    """Raise OSError if the disk does not take a file: else the package's own thread fails, and prints a traceback."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{os.getpid()}"
    try:
        path.write_bytes(bytes(PROBE))
    finally:
        path.unlink(missing_ok=True)


def _tag(metric: Metric, labels: Labels) -> str:
    """The tag of a value: of the user's own, the name as given, and the rank unless it is the first."""
    if metric.name == f"{PREFIX}user":
        name, rank = labels
        return name if rank == "0" else f"{name}/rank{rank}"
    return metric.tag(labels)
