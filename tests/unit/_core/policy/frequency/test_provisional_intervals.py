"""How often is saved while it is measured what saves cost: as a table."""

import random

import pytest

from fastckpt._core.policy.frequency.intervals import FREE, LONGEST, Fixed, Intervals
from fastckpt._core.policy.frequency.provisional_intervals import (
    COST,
    MEMORY,
    STORAGE,
    ProvisionalIntervals,
    provisional,
)

OVERHEAD = 0.035


@pytest.mark.parametrize(
    ("pace", "fixed", "expected"),
    [
        (None, FREE, (1, LONGEST)),
        (ProvisionalIntervals(0.5), FREE, (2, 60)),
        (ProvisionalIntervals(0.5, stall=0.001), FREE, (2, 60)),
        (ProvisionalIntervals(0.5, stall=0.1), FREE, (6, 60)),
        (ProvisionalIntervals(0.5, stall=0.5), FREE, (10, 60)),
        (ProvisionalIntervals(0.5, stall=2.0), FREE, (20, 60)),
        (ProvisionalIntervals(0.5, stall=60.0), FREE, (600, 600)),
        (ProvisionalIntervals(0.001), FREE, (2, 30000)),
        (ProvisionalIntervals(0.001, stall=0.01), FREE, (286, 29744)),
        (ProvisionalIntervals(0.001, stall=0.9), FREE, (5000, 30000)),
        (ProvisionalIntervals(2.0), FREE, (2, 14)),
        (ProvisionalIntervals(3.0), FREE, (1, 10)),
        (ProvisionalIntervals(20.0, stall=3.0), FREE, (1, 1)),
        (ProvisionalIntervals(60.0), FREE, (1, 1)),
        (ProvisionalIntervals(0.5, duration=20.0), FREE, (2, 80)),
        (ProvisionalIntervals(0.5, stall=0.001, compared=True), FREE, (1, 60)),
        (ProvisionalIntervals(0.5, stall=0.1, compared=True), FREE, (6, 60)),
        (ProvisionalIntervals(20.0, compared=True), FREE, (1, 1)),
        (ProvisionalIntervals(0.5), Fixed(memory=1), (1, 60)),
        (ProvisionalIntervals(0.5, stall=0.5), Fixed(memory=3), (5, 60)),
        (ProvisionalIntervals(0.5), Fixed(memory=1000), (2, 60)),
        (ProvisionalIntervals(0.5), Fixed(storage=10), (2, 10)),
        (ProvisionalIntervals(0.5, stall=0.1), Fixed(storage=10), (6, 6)),
        (ProvisionalIntervals(0.5), Fixed(storage=7200), (2, 60)),
    ],
)
def test_provisional_intervals(pace, fixed, expected):
    found = provisional(pace, OVERHEAD, fixed)
    assert (found.memory, found.storage) == expected


def test_seconds_between_saves_are_bounded_and_so_is_what_they_cost():
    rng = random.Random(3)
    for _ in range(2000):
        turn, overhead = 10 ** rng.uniform(-4, 2), rng.choice([0.001, 0.01, 0.035, 0.2])
        pace = ProvisionalIntervals(turn, turn * 10 ** rng.uniform(-4, 3), 10 ** rng.uniform(-2, 3), rng.random() < 0.5)
        found = provisional(pace, overhead)
        assert isinstance(found, Intervals)
        seconds = found.memory * turn
        costs_much = pace.stall / max(turn, MEMORY - turn) > COST
        assert seconds <= max(MEMORY, turn) * 1.001 or (costs_much and pace.stall / (seconds - turn) >= COST * 0.999)
        assert pace.stall / seconds <= max(COST, overhead) * 1.001
        assert found.storage * turn <= max(STORAGE, 2 * pace.duration, seconds) * 1.001
