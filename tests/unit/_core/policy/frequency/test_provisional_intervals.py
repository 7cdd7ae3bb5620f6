"""Frequency of saves while their cost is measured, as a table."""

import random

import pytest

from fastckpt._core.policy.frequency.intervals import FREE, LONGEST, Fixed, Intervals
from fastckpt._core.policy.frequency.profiling import FEWEST, Profile
from fastckpt._core.policy.frequency.provisional_intervals import (
    COST,
    MEMORY,
    STORAGE,
    provisional,
)

OVERHEAD = 0.035


def known(stall: float = 0.0, duration: float = 0.0, *, compared: bool = False) -> Profile:
    """What has been measured so far."""
    return Profile(1.0, stall, duration, plain=FEWEST if compared else 0)


@pytest.mark.parametrize(
    ("turn", "profile", "fixed", "expected"),
    [
        (None, None, FREE, (1, LONGEST)),
        (0.5, None, FREE, (2, 60)),
        (0.5, known(stall=0.001), FREE, (2, 60)),
        (0.5, known(stall=0.1), FREE, (6, 60)),
        (0.5, known(stall=0.5), FREE, (10, 60)),
        (0.5, known(stall=2.0), FREE, (20, 60)),
        (0.5, known(stall=60.0), FREE, (600, 600)),
        (0.001, None, FREE, (2, 30000)),
        (0.001, known(stall=0.01), FREE, (286, 29744)),
        (0.001, known(stall=0.9), FREE, (5000, 30000)),
        (2.0, None, FREE, (2, 14)),
        (3.0, None, FREE, (1, 10)),
        (20.0, known(stall=3.0), FREE, (1, 1)),
        (60.0, None, FREE, (1, 1)),
        (0.5, known(duration=20.0), FREE, (2, 80)),
        (0.5, known(stall=0.001, compared=True), FREE, (1, 60)),
        (0.5, known(stall=0.1, compared=True), FREE, (6, 60)),
        (20.0, known(compared=True), FREE, (1, 1)),
        (0.5, None, Fixed(memory=1), (1, 60)),
        (0.5, known(stall=0.5), Fixed(memory=3), (5, 60)),
        (0.5, None, Fixed(memory=1000), (2, 60)),
        (0.5, None, Fixed(storage=10), (2, 10)),
        (0.5, known(stall=0.1), Fixed(storage=10), (6, 6)),
        (0.5, None, Fixed(storage=7200), (2, 60)),
    ],
)
def test_provisional_intervals_follow_from_iteration_and_save_times(turn, profile, fixed, expected):
    found = provisional(turn, profile, OVERHEAD, fixed)
    assert (found.memory, found.storage) == expected


def test_provisional_intervals_bound_the_time_between_saves_and_their_cost():
    rng = random.Random(3)
    for _ in range(2000):
        turn, overhead = 10 ** rng.uniform(-4, 2), rng.choice([0.001, 0.01, 0.035, 0.2])
        pace = known(turn * 10 ** rng.uniform(-4, 3), 10 ** rng.uniform(-2, 3), compared=rng.random() < 0.5)
        found = provisional(turn, pace, overhead)
        assert isinstance(found, Intervals)
        seconds = found.memory * turn
        costs_much = pace.stall / max(turn, MEMORY - turn) > COST
        assert seconds <= max(MEMORY, turn) * 1.001 or (costs_much and pace.stall / (seconds - turn) >= COST * 0.999)
        assert pace.stall / seconds <= max(COST, overhead) * 1.001
        assert found.storage * turn <= max(STORAGE, 2 * pace.duration, seconds) * 1.001
