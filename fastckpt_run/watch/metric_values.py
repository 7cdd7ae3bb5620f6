"""The values of metrics at one instant, by the names and labels of the table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fastckpt._core import metrics
from fastckpt._core.report.metric_table import BY_NAME, METRICS, PREFIX, Labels, Metric, Scope


@dataclass(frozen=True)
class StepHistogram:
    """Counts of steps by duration.

    Attributes:
        bounds: Upper bounds of the buckets, in seconds; one more bucket has no bound.
        counts: Of each bucket.
        total: Seconds that all of them took.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float

    def quantile(self, part: float) -> float | None:
        """The upper bound of the bucket with that quantile; infinity for the last one, None without any step."""
        wanted, so_far = part * sum(self.counts), 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            so_far += count
            if count and so_far >= wanted:
                return bound
        return None


@dataclass
class MetricValues:
    """Values, and those of the histograms.

    Attributes:
        only: The scope of the values to take; None for all.
    """

    series: dict[str, dict[Labels, float]] = field(default_factory=dict)
    histograms: dict[str, StepHistogram] = field(default_factory=dict)
    only: Scope | None = None

    def add(self, name: str, value: float | StepHistogram, *labels: str) -> None:
        """Add a value of a metric of the table, named without the prefix; raises KeyError if that has none such."""
        metric = BY_NAME[f"{PREFIX}{name}"]
        if self.only not in (None, metric.scope):
            return
        if isinstance(value, StepHistogram):
            self.histograms[metric.name] = value
        else:
            self.series.setdefault(metric.name, {})[labels] = value

    def update(self, others: "MetricValues") -> None:
        """Add other values."""
        for name, series in others.series.items():
            self.series.setdefault(name, {}).update(series)
        self.histograms |= others.histograms

    def __iter__(self) -> Iterator[tuple[Metric, Labels, float]]:
        """All values but the histograms', in the order of the table."""
        for metric in METRICS:
            for labels, value in self.series.get(metric.name, {}).items():
                yield metric, labels, value

    def for_event(self) -> dict[str, float | str]:
        """Return values as an event ``metrics`` has them: a histogram by its count, its sum and two quantiles."""
        found = {metric.key(labels): value for metric, labels, value in self}
        for name, steps in self.histograms.items():
            found |= {f"{name}_count": sum(steps.counts), f"{name}_sum": steps.total}
            for part in (0.5, 0.99):
                if (value := steps.quantile(part)) is not None:
                    found[f'{name}{{quantile="{part}"}}'] = value
        return metrics.finite({name: _short(value) for name, value in found.items()})


def _short(value: float) -> float:
    """Shorten a number to six digits, as a log should have it; whole numbers stay as they are."""
    return value if not math.isfinite(value) or value == int(value) else float(f"{value:.6g}")
