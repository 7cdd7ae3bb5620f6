"""Decisions on restarts of failed workers: pure functions of the results of all attempts."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fastckpt.errors import ConfigError

KILLS_PER_STALL = 10
"""Kills from outside that count as much as one failure of the script.

Of kills that come at random, some rows fall into the time that a start takes to come further. A row of ten times the
limit means that next to nothing gets through.
"""
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_BUDGET = re.compile(r"([1-9]\d*)/(\d+(?:\.\d+)?|)(s|min|h)")


class TrainingPosition(NamedTuple):
    """The progress of training. Positions order by the last save, then by the steps since.

    Attributes:
        step: The newest step that a save or a load has named; -1 before that. Only the order counts: it may be epochs.
        since: Optimizer steps since then.
    """

    step: int = -1
    since: int = 0


class Stretch(NamedTuple):
    """The part of the way that an attempt went: the step that it resumed from (-1: none), and where it ended."""

    resumed: int
    reached: TrainingPosition


@dataclass(frozen=True)
class Attempt:
    """The result of one start of the workers.

    Attributes:
        watched: True if the job was known to have a checkpointer; without one its progress is unknown.
        stretches: By checkpoint directory; empty if no worker had loaded or done anything.
        seconds: Time in which steps were taken.
        failed: True if it ended by a failure; else for other reasons, such as a node that joined.
        killed: True if a signal from outside ended it, which proves nothing about the script.
        why: The failure, in words.
        number: Number of the start, from 1.
    """

    watched: bool = False
    stretches: Mapping[str, Stretch] = field(default_factory=dict)
    seconds: float = 0.0
    failed: bool = True
    killed: bool = False
    why: str = ""
    number: int = 0


@dataclass(frozen=True)
class Course:
    """The course of all attempts so far; only those that matter for the next ones are kept.

    Attributes:
        stalled: As `stalls`.
        resumed: The step that the last attempt resumed, by checkpoint directory.
        furthest: Furthest step of all.
        attempts: Number of attempts.
    """

    stalled: tuple[Attempt, ...] = ()
    resumed: Mapping[str, int] = field(default_factory=dict)
    furthest: Mapping[str, TrainingPosition] = field(default_factory=dict)
    attempts: int = 0

    def followed_by(self, attempt: Attempt) -> "Course":
        """The course with a further attempt."""
        stalled, resumed, furthest, progress = self.stalled, {**self.resumed}, {**self.furthest}, False
        for directory, stretch in attempt.stretches.items():
            before = resumed.get(directory, stretch.resumed)
            # It resumes a save of the attempt before, so that one did make progress, whatever it reported.
            if stretch.resumed > before:
                stalled = ()
            start = TrainingPosition(stretch.resumed)
            # After a fall back to an older checkpoint, steps that are done again count: they were lost, not repeated.
            best = start if stretch.resumed < before else max(start, furthest.get(directory, start))
            progress |= stretch.reached > best
            resumed[directory], furthest[directory] = stretch.resumed, max(stretch.reached, best)
        if progress:
            stalled = ()
        # Without a checkpointer progress is unknown, and an unknown attempt must not end the job.
        elif attempt.failed and attempt.watched:
            stalled = (*stalled, attempt)
        return Course(stalled, resumed, furthest, self.attempts + 1)


def stalls(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The latest failures in a row that came without progress.

    An attempt makes progress when it comes further than all before it: steps that were done once, not saved and
    done again are none. An attempt that resumes a newer step than the one before proves that that one made
    progress. One that resumes an older step may repeat lost steps.
    """
    course = Course()
    for attempt in attempts:
        course = course.followed_by(attempt)
    return [*course.stalled]


def is_stuck(stalled: Iterable[Attempt], limit: int) -> bool:
    """Return whether stalls in a row show that the job cannot come further; never with a limit of 0.

    Args:
        stalled: As `stalls` gave them.
        limit: Failures of the script; a kill from outside is a `KILLS_PER_STALL`-th of one.
    """
    weight = sum(1 if attempt.killed else KILLS_PER_STALL for attempt in stalled)
    return 0 < limit * KILLS_PER_STALL <= weight


class Budget(NamedTuple):
    """The number of restarts that are given back after each so many seconds of progress."""

    restarts: int
    seconds: float


def parse_budget(text: str) -> Budget | None:
    """Read "1/h", "3/90min" or "2/0.5h"; None if ``text`` is empty. Raises ConfigError."""
    if not text:
        return None
    found = _BUDGET.fullmatch(text)
    seconds = float(found[2] or 1) * _UNITS[found[3]] if found else 0.0
    if found is None or not seconds:
        raise ConfigError(
            f"restart_budget is {text!r}; give RESTARTS/TIME, both above 0, the time in s, min or h, such as 1/h or "
            f"3/90min, or nothing to give none back"
        )
    return Budget(int(found[1]), seconds)


def given_back(budget: Budget, trained: float, spent: int) -> tuple[int, float]:
    """The number of ``spent`` restarts given back for ``trained`` seconds of progress, and the seconds left over.

    Time is not saved up while nothing is spent.
    """
    restarts = int(trained // budget.seconds) * budget.restarts
    return (restarts, trained % budget.seconds) if restarts < spent else (spent, 0.0)
