"""Kills that are planned for a run: at which step of which rank, and in which phase."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

BETWEEN, SAVE, PERSIST = "between steps", "amid a save", "amid a persist"
KINDS = (BETWEEN, SAVE, PERSIST)
_MOST_PHASES = 3
"""Phases of a save or a persist, at least: a kill comes at the begin of one of these."""


@dataclass(frozen=True)
class PlannedKill:
    """A kill of one rank, once, at a step or the first that fits after it.

    Attributes:
        number: Number of the kill, from 1.
        kind: One of `KINDS`.
        rank: The rank.
        step: The step.
        skip: Phases of the save, or the persist, that are begun before it.
    """

    number: int
    kind: str
    rank: int
    step: int
    skip: int = 0


@dataclass(frozen=True)
class CourseOfRun:
    """The steps of a run that was not interrupted.

    Attributes:
        saved: Steps that were saved.
        durable: Saves among them that became durable.
        last: The last step.
        ranks: Number of its ranks.
    """

    saved: Sequence[int]
    durable: Sequence[int]
    last: int
    ranks: int


def plan_kills(course: CourseOfRun, count: int, seed: int) -> list[PlannedKill]:
    """Spread kills over the steps after the first save: each in a part of its own, in all kinds by turns.

    There are fewer than ``count`` if there are not that many steps.
    """
    first, chooser = min(course.saved), random.Random(seed)
    kinds, found = chooser.sample(KINDS, len(KINDS)), list[PlannedKill]()
    steps = range(first + 1, course.last)
    count = min(count, len(steps))
    for number in range(count):
        part = steps[len(steps) * number // count : len(steps) * (number + 1) // count]
        kind = kinds[number % len(kinds)]
        fitting = {
            BETWEEN: list(part),
            SAVE: [step for step in course.saved if step in part],
            # An older one must be durable, or in memory, to be resumed.
            PERSIST: [step for step in course.durable if step in part],
        }
        if not fitting[kind]:
            kind = BETWEEN
        rank, skip = chooser.randrange(course.ranks), chooser.randrange(_MOST_PHASES)
        found.append(PlannedKill(number + 1, kind, rank, chooser.choice(fitting[kind]), skip))
    return found
