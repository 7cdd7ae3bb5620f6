"""Stalls among failures, and restarts given back by progress, as tables."""

import re
from dataclasses import replace

import pytest

from fastckpt._core.policy.restarts import (
    Attempt,
    Budget,
    Stretch,
    TrainingPosition,
    given_back,
    is_stuck,
    parse_budget,
    stalls,
)
from fastckpt.errors import ConfigError
from tests.support.tables import for_each

NOTHING = Attempt(watched=True)
"""All workers died before they had loaded."""
UNWATCHED = Attempt()


def came(resumed: int, step: int, since: int = 0, failed: bool = True, directory: str = "d") -> Attempt:
    return Attempt(True, {directory: Stretch(resumed, TrainingPosition(step, since))}, failed=failed)


def both(first: tuple[int, int], second: tuple[int, int]) -> Attempt:
    """Two checkpoint directories: what was resumed from, and the newest step named."""
    return Attempt(True, {d: Stretch(r, TrainingPosition(s)) for d, (r, s) in {"a": first, "b": second}.items()})


FRESH = came(-1, 50, 6)
"""Bad data at step 57, a save every ten steps."""
AGAIN = came(50, 50, 6)

TABLE = [
    ("a job without a checkpointer", [UNWATCHED] * 9, 0),
    ("death before anything, each time", [NOTHING] * 3, 3),
    ("death while loading after progress", [FRESH, NOTHING, NOTHING], 2),
    ("a first attempt that resumes and does nothing", [came(50, 50)], 1),
    ("the same step again, though six steps were done", [FRESH, AGAIN, AGAIN, AGAIN], 3),
    ("an earlier step", [FRESH, came(50, 50, 5), came(50, 50, 2)], 2),
    ("one step further each time", [FRESH, came(50, 50, 7), came(50, 50, 8), came(50, 60, 0)], 0),
    ("the save before the bad step was cut off once", [came(-1, 56), came(55, 56), came(56, 56), came(56, 56)], 2),
    ("steps are epochs: fewer optimizer steps, a later epoch", [came(5, 5, 999), came(5, 6, 100), came(6, 6, 150)], 0),
    ("killed between saves, at random", [came(-1, 50, 9), came(50, 50, 3), came(50, 60, 1), came(60, 60, 5)], 0),
    ("stalls before the saves were kept after all", [FRESH, AGAIN, AGAIN, came(55, 55)], 1),
    ("memory was lost: what is done again counts", [came(40, 50, 6), came(10, 20), came(20, 30), came(20, 30, 4)], 0),
    ("lost, and nothing done again", [came(40, 50, 6), came(10, 10), came(10, 10)], 2),
    ("lost before it was resumed: saves count", [came(-1, 5000), came(9, 90), came(90, 180), came(180, 270)], 1),
    ("a node joined: no failure", [FRESH, came(50, 50, 2, failed=False), came(50, 50, 2, failed=False)], 0),
    ("nor does it end a row", [FRESH, AGAIN, came(50, 50, 2, failed=False), AGAIN], 2),
    ("but progress before it does", [FRESH, AGAIN, came(50, 60, 0, failed=False), came(60, 60, 0)], 1),
    ("the first fell before anyone knew of a checkpointer", [UNWATCHED, NOTHING, NOTHING], 2),
    ("one of two directories moves on", [both((1, 5), (1, 5)), both((1, 5), (5, 9)), both((1, 5), (9, 12))], 0),
    ("neither moves on", [both((1, 5), (1, 5)), both((1, 5), (5, 5)), both((1, 5), (5, 5))], 2),
    ("a new directory is progress", [came(-1, 5), came(5, 5, directory="new"), came(-1, 3, directory="new")], 0),
]  # fmt: skip


@for_each(*TABLE)
def test_failed_attempts_without_progress_are_stalls(attempts: list[Attempt], expected: int) -> None:
    found = stalls(attempts)
    assert len(found) == expected
    assert all(attempt.failed for attempt in found)


KILLED = replace(NOTHING, killed=True)


@for_each(
    ([NOTHING] * 2, 3, False),
    ([NOTHING] * 3, 3, True),
    ([KILLED] * 29, 3, False),
    ([KILLED] * 30, 3, True),
    ([NOTHING] * 2 + [KILLED] * 9, 3, False),
    ([KILLED] * 9 + [NOTHING] * 2 + [KILLED], 3, True),
    ([NOTHING] * 99, 0, False),
)
def test_a_kill_from_outside_counts_a_tenth_of_a_stall(row: list[Attempt], limit: int, expected: bool) -> None:
    assert is_stuck(row, limit) == expected


@for_each(("", None), ("1/h", Budget(1, 3600)), ("3/90min", Budget(3, 5400)), ("1/0.05s", Budget(1, 0.05)))
def test_a_restart_budget_is_parsed(text: str, expected: Budget | None) -> None:
    assert parse_budget(text) == expected


@for_each("3", "/h", "0/h", "1/0.0s", "1/day", "1.5/h", "1/h ", "1/-2h")
def test_an_invalid_restart_budget_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text)) + ".*such as 1/h or 3/90min"):
        parse_budget(text)


@for_each(
    ("1/h", 3599, 3, (0, 3599)),
    ("1/h", 3600, 3, (1, 0)),
    ("1/h", 9 * 3600 + 7, 3, (3, 0)),
    ("1/h", 1800, 0, (0, 0)),
    ("2/h", 3700, 1, (1, 0)),
)
def test_training_time_gives_restarts_back_at_the_rate_of_the_budget(
    budget: str, trained: float, spent: int, expected: tuple[int, float]
) -> None:
    assert given_back(parse_budget(budget), trained, spent) == expected
