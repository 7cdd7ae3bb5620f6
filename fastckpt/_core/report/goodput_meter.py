"""Goodput of a launch while it runs: the accounting of the report, from events as they come."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fastckpt._core import metrics
from fastckpt._core.report.events import Event
from fastckpt._core.report.goodput import UNEXPLAINED, USEFUL, Steps, settled, spend, total, unit_of
from fastckpt._core.report.launches import ACCOUNTED, Launch, LaunchRound, begun, directory_of, heaviest, record, weigh
from fastckpt._core.report.step_unit import StepUnit

KEPT = 100
"""Rounds of workers that are kept, at least; of those before only sums, so that restarts take no memory for ever."""


@dataclass(frozen=True)
class LaunchTime:
    """The time of a launch so far, in nanoseconds.

    Attributes:
        by_cause: Of each cause, up to the instant from which on causes are not decided yet.
        age: Since its begin.
        steps: Its progress in steps.
        failures: Number of ends of rounds by kind: a worker ``died`` or ``hung``, or workers were stopped
            ``elsewhere``.
        repeats: The steps that its last round of workers has to do once more.
    """

    by_cause: Mapping[str, int]
    age: int
    steps: Steps = field(default_factory=Steps)
    failures: Mapping[str, int] = field(default_factory=dict)
    repeats: int = 0

    @property
    def goodput(self) -> float | None:
        """The useful part of its age; None if no worker reported a step."""
        return self.by_cause[USEFUL] / self.age if self.age > 0 and self.steps.new else None


class _Course:
    """A launch as one checkpoint directory shows it: its newest rounds, and the sums of those before them."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self._begin = launch, launch.begin
        self._spent = total([])
        self._steps: Steps | None = None
        self._failures = Counter[str]()

    @classmethod
    def beside(cls, other: "_Course") -> "_Course":
        """The same launch as another directory will show it: so far without anything of that directory."""
        rounds = [
            replace(one, first={**one.first}, joined={}, imported={}, loads={}, samples=[])
            for one in other.launch.rounds
        ]
        found = cls(replace(other.launch, rounds=rounds))
        found._begin, found._failures = other._begin, other._failures.copy()
        found._spent[UNEXPLAINED] = other.launch.begin - other._begin
        return found

    def record(self, event: Event) -> None:
        """Record an event of the launch, or of the directory."""
        record(self.launch, event)
        if len(self.launch.rounds) > 2 * KEPT:
            self._sum_up()

    def _sum_up(self) -> None:
        """Replace rounds by their sums, up to one that began when the one before it ended."""
        rounds = self.launch.rounds
        pairs = ((i, rounds[i - 1].stopped, rounds[i].begin) for i in range(len(rounds) - KEPT, 0, -1))
        count = next((i for i, stopped, begin in pairs if stopped == begin), 0)
        if count:
            before = replace(self.launch, rounds=rounds[:count], end=rounds[count].begin, outcome="")
            self._steps = self._steps or Steps(self._unit)
            self._spent = total([self._spent, spend(before, self._steps).by_cause()])
            self._failures += _failures(before.rounds)
            self.launch.rounds = rounds[count:]
            self.launch.begin = before.end

    def measure(self, now: int, outcome: str) -> LaunchTime:
        """Measure, as `GoodputMeter.measure`."""
        launch = self.launch
        launch.end, launch.outcome = now, outcome or launch.outcome
        steps = replace(self._steps) if self._steps else Steps(self._unit)
        spent = spend(launch, steps)
        decided = settled(launch, spent)
        by_cause = total([self._spent, *(span.shares for span in spent.spans if span.end <= decided)])
        # The last round is not over: it may yet be seen why it was stopped.
        failures = self._failures + _failures(launch.rounds[:-1]) + _failures(launch.rounds[-1:], stopped=False)
        failures["elsewhere"] += 0
        return LaunchTime(by_cause, now - self._begin, steps, failures, spent.repeats[-1])

    @property
    def _unit(self) -> StepUnit:
        """Return the unit; once rounds were summed up, it stays as it was for them."""
        return self._steps.unit if self._steps else unit_of([self.launch])


def _failures(rounds: Sequence[LaunchRound], *, stopped: bool = True) -> Counter[str]:
    """Count the ends of rounds by kind; a round that was ``stopped`` without a failure counts as "elsewhere"."""
    found = Counter(one.failure.kind for one in rounds if one.failure)
    found["elsewhere"] = sum(stopped and one.failure is None and one.stopped is not None for one in rounds)
    return found


class GoodputMeter:
    """Follows the events of one launch; `measure` divides its time as `goodput.spend` does.

    It keeps the report's values of events, and not the events: some hundred bytes for each record of progress of the
    newest rounds of workers.

    Attributes:
        directory: The checkpoint directory that shows how far the job is; empty before the first worker has one.
    """

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}
        self._weights: dict[str, tuple[bool, int]] = {}
        self.directory = ""

    def follow(self, event: Event) -> None:
        """Take the next event of the launch, in order."""
        if event["event"] not in ACCOUNTED:
            return
        event = json.loads(metrics.to_line(dict(event)))  # as the report will read it
        directory = directory_of(event)
        if not self._courses:
            self._courses[directory or ""] = _Course(begun(event))
        if directory is None:
            for course in self._courses.values():
                course.record(event)
            return
        weigh(self._weights, event)
        if directory not in self._courses:
            # Until a worker has named a directory, the launch is known without one.
            before = self._courses.pop("", None)
            self._courses[directory] = before or _Course.beside(next(iter(self._courses.values())))
        self._courses[directory].record(event)
        self.directory = heaviest(self._weights, self._weights)

    def measure(self, now: int, outcome: str = "", directory: str = "") -> LaunchTime:
        """Divide the time until ``now`` (nanoseconds of the monotonic clock), where it ends if an outcome is given.

        A ``directory`` is shown instead of the one that shows how far the job is.
        """
        course = self._courses.get(directory or self.directory)
        return LaunchTime(total([]), 0) if course is None else course.measure(now, outcome)
