"""The metrics of a job while it runs: collected once a second, for the endpoint, TensorBoard and the event log."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.saver.server import Saver
from fastckpt_run.watch.gpu_metrics import GpuMetrics
from fastckpt_run.watch.http_server import Page
from fastckpt_run.watch.job_metrics import JobMetrics
from fastckpt_run.watch.metric_values import MetricValues
from fastckpt_run.watch.node_metrics import INTERVAL, HostMetrics, Probe, file_systems
from fastckpt_run.watch.tensorboard_runs import TensorBoardRuns

FIRST, SHARE = 60.0, 0.05
"""Seconds from one event ``metrics`` to the next, or the part of the job's age if that is more: a log stays small."""
RARELY = 60.0
"""Seconds between two looks at the host when only events need them."""


class JobWatch:
    """Collects the values of all metrics, and passes them on.

    Args:
        settings: Settings of the job.
        saver: Has the telemetry of the workers, and counts of checkpoints.
        ranks: The ranks of this node's workers in the job, by local rank.
    """

    def __init__(self, settings: Settings, saver: Saver, ranks: Callable[[], dict[int, int]]) -> None:
        self._shown = bool(settings.metrics_port or settings.tensorboard)
        self._saver = saver
        self._job, self._host = JobMetrics(saver, ranks), HostMetrics()
        interval = INTERVAL if self._shown else RARELY
        arenas = Path(settings.arenas)
        self._disks = Probe("fastckpt-disks", lambda: file_systems(arenas, saver.arenas), interval)
        self._directories: set[str] = set()
        self._probes = [self._disks, Probe("fastckpt-gpus", GpuMetrics().collect, interval)]
        self._runs = TensorBoardRuns(settings.tensorboard) if settings.tensorboard else None
        self._newest = MetricValues()
        self._begun = self._recorded = time.monotonic()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin to observe; raises ConfigError if TensorBoard is to be written, and cannot be."""
        if self._runs is not None:
            self._runs.begin()
        metrics.listen(self._job.observe)
        for probe in self._probes:
            probe.begin()
        self._collect()

    def pages(self) -> dict[tuple[str, str], Page]:
        """The pages that it serves."""
        from fastckpt_run.watch.metrics_endpoint import MetricsEndpoint  # most jobs serve nothing

        return {("GET", "/metrics"): MetricsEndpoint(lambda: self._newest).page}

    def newest(self) -> MetricValues:
        """The values of the last look; of now if nobody else wants them each second."""
        return self._newest if self._shown else self._collect()

    def look(self) -> None:
        """Follow the events, and collect the values if they are requested now."""
        with self._lock:
            self._job.take_events()
        now = time.monotonic()
        due = now - self._recorded >= max(FIRST, SHARE * (now - self._begun))
        if self._shown or due:
            self._pass_on(self._collect(), record=due)

    def end(self, outcome: str) -> None:
        """The launch ends: pass on the last values, and give TensorBoard a moment to have them written."""
        self._pass_on(self._collect(outcome), record=True)
        metrics.unlisten(self._job.observe)
        for probe in self._probes:
            probe.close()
        if self._runs is not None:
            self._runs.close()

    def _collect(self, outcome: str = "") -> MetricValues:
        with self._lock:
            if new := self._saver.arenas().keys() - self._directories:
                self._directories |= new
                self._disks.hurry()
            found = self._job.collect(outcome)
            found.update(self._host.collect())
            for probe in self._probes:
                found.update(probe.newest())
            self._newest = found
        return found

    def _pass_on(self, values: MetricValues, *, record: bool) -> None:
        if record:
            self._recorded = time.monotonic()
            metrics.event("metrics", step=self._job.step, values=values.for_event())
        if self._runs is not None:
            self._runs.put(self._job.step, self._job.restarts, values, now=record)
