"""Goodput of a launch while it runs: the accounting of the report, from events as they come."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from fastckpt._core import metrics
from fastckpt._core.report.events import Event
from fastckpt._core.report.goodput import USEFUL, Steps, settled, spend, steps_per_step, total
from fastckpt._core.report.launches import ACCOUNTED, Launch, begun, directory_of, heaviest, record, weigh


@dataclass(frozen=True)
class LaunchTime:
    """The time of a launch so far, in nanoseconds.

    Attributes:
        by_cause: Of each cause, up to the instant from which on causes are not decided yet.
        age: Since its begin.
        steps: How far it came.
        failures: How often rounds ended by kind: a worker ``died`` or ``hung``, or workers were stopped ``elsewhere``.
    """

    by_cause: Mapping[str, int]
    age: int
    steps: Steps = field(default_factory=Steps)
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float | None:
        """The useful part of its age; None if no worker reported a step."""
        return self.by_cause[USEFUL] / self.age if self.age > 0 and self.steps.new else None


class GoodputMeter:
    """Follows the events of one launch, whose time `measure` divides as `goodput.spend` does.

    It keeps what the report needs of events, and not the events: some hundred bytes for each record of progress.

    Attributes:
        directory: The checkpoint directory that shows how far the job is; empty before the first worker has one.
    """

    def __init__(self) -> None:
        self._common: list[Event] = []
        self._launches: dict[str, Launch] = {}
        self._weights: dict[str, tuple[bool, int]] = {}
        self.directory = ""

    def follow(self, event: Event) -> None:
        """Take the next event of the launch, in order."""
        if event["event"] not in ACCOUNTED:
            return
        event = json.loads(metrics.to_line(dict(event)))  # as the report will read it
        directory = directory_of(event)
        if directory is None:
            self._common.append(event)
            for launch in self._launches.values():
                record(launch, event)
            if not self._launches:
                self._launches[""] = self._launch(event)
            return
        weigh(self._weights, event)
        if directory not in self._launches:
            self._launches[directory] = self._launch(event)
        record(self._launches[directory], event)
        self.directory = heaviest(self._weights, self._weights)

    def _launch(self, first: Event) -> Launch:
        launch = begun(self._common[0] if self._common else first)
        for event in self._common:
            record(launch, event)
        return launch

    def measure(self, now: int, outcome: str = "") -> LaunchTime:
        """Divide the time until ``now`` (nanoseconds of the monotonic clock), where it ends if an outcome is given."""
        launch = self._launches.get(self.directory)
        if launch is None:
            return LaunchTime(total([]), 0)
        launch.end, launch.outcome = now, outcome or launch.outcome
        steps = Steps(self.per_step)
        spent = spend(launch, steps)
        decided = settled(launch, spent)
        by_cause = total(span.shares for span in spent.spans if span.end <= decided)
        failures = Counter(one.failure.kind for one in launch.rounds if one.failure)
        failures["elsewhere"] = sum(one.failure is None and one.stopped is not None for one in launch.rounds[:-1])
        return LaunchTime(by_cause, now - launch.begin, steps, failures)

    @property
    def per_step(self) -> Fraction:
        """The number of optimizer steps that make one step of the script."""
        launch = self._launches.get(self.directory)
        return steps_per_step([launch]) if launch is not None else Fraction(1)
