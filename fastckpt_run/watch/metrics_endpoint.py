"""The page with all metrics that Prometheus and its like read, in OpenMetrics or in the classic text format."""

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fastckpt._core.report.metric_table import METRICS, Kind
from fastckpt_run.watch.http_server import Request, Response
from fastckpt_run.watch.metric_values import MetricValues

MOST = 4
"""Formats that are kept of one collection."""


class MetricsEndpoint:
    """Answers requests with the newest values, which each format writes once, however many ask.

    Args:
        newest: The values; another object once they have changed.
    """

    def __init__(self, newest: Callable[[], MetricValues]) -> None:
        self._newest = newest
        self._of = MetricValues()
        self._written: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def page(self, request: Request) -> Response:
        """Answer a request, in the format that its header Accept prefers."""
        try:
            encode, kind = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # the header asks for a version that is none
            encode, kind = choose_encoder("")
        with self._lock:
            values = self._newest()
            if values is not self._of or len(self._written) >= MOST:
                self._of, self._written = values, {}
            if kind not in self._written:
                self._written[kind] = encode(registry(values))
            return Response(self._written[kind], kind)


def registry(values: MetricValues) -> CollectorRegistry:
    """A registry that collects these values alone."""
    found = CollectorRegistry(auto_describe=False)
    found.register(_Collector(values))
    return found


def to_text(values: MetricValues) -> bytes:
    """The values in the classic text format."""
    return generate_latest(registry(values))


class _Collector(Collector):
    """All metrics of the table, those without values, too: so that a query finds their names."""

    def __init__(self, values: MetricValues) -> None:
        self._values = values

    def describe(self) -> Iterable[Family]:
        """Return nothing: names are the table's, and unique."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield each metric of the table."""
        for metric in METRICS:
            if metric.kind is Kind.HISTOGRAM:
                yield self._histogram(metric.name, metric.help, metric.unit)
                continue
            make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = make(metric.family, metric.help, labels=metric.labels, unit=metric.unit)
            for labels, value in self._values.series.get(metric.name, {}).items():
                family.add_metric(labels, value)
            yield family

    def _histogram(self, name: str, help: str, unit: str) -> Family:
        family = HistogramMetricFamily(name, help, unit=unit)
        if (steps := self._values.histograms.get(name)) is not None:
            bounds = [*map(floatToGoString, steps.bounds), "+Inf"]
            family.add_metric([], list(zip(bounds, accumulate(steps.counts), strict=True)), steps.total)
        return family
