"""Intervals that follow from costs: tables, and random costs beside brute force."""

import random
from dataclasses import replace
from itertools import pairwise
from math import nan

import pytest

from fastckpt._core.policy.frequency.intervals import (
    Costs,
    Fixed,
    Intervals,
    apart,
    checked_overhead,
    fit,
    multiple,
    unsaved_steps,
)
from fastckpt.errors import ConfigError
from tests.support.tables import for_each


@for_each(0, 1, 1e-9, nan)
def test_an_impossible_overhead_is_refused(overhead):
    with pytest.raises(ConfigError, match=f"overhead is {overhead}; give the part"):
        checked_overhead(overhead)


def test_fitted_intervals_keep_within_the_overhead_and_are_near_the_shortest_possible():
    """Beside brute force over all pairs: the sum of both is at most an eighth more, or two steps."""
    rng = random.Random(7)
    for _ in range(300):
        costs = Costs(1.0, 10 ** rng.uniform(-3, 0.5), 10 ** rng.uniform(-3, 0.8), 10 ** rng.uniform(-1, 1.5))
        overhead = rng.choice([0.02, 0.035, 0.05, 0.1])
        found = fit(costs, overhead)
        assert costs.overhead(found) <= overhead * (1 + 1e-6) and found.storage >= apart(costs)
        best = min(memory + storage_for(costs, overhead, memory) for memory in range(1, found.memory + found.storage))
        assert found.memory + found.storage <= max(best * 1.125, best + 2), (costs, overhead, found, best)


def storage_for(costs, overhead, memory):
    left = overhead - costs.snapshot / memory
    if left <= 0:
        return 10**9
    needed = max(apart(costs), -(-costs.persist // left))
    return multiple(int(needed), memory)


FAST = Costs(iteration=1.0, snapshot=0.1, persist=0.2, duration=5.0)


@for_each(
    (Costs(1.0, 0.0), Fixed(), (1, 1)),
    (FAST, Fixed(), (4, 8)),
    (FAST, Fixed(memory=3), (3, 12)),
    (FAST, Fixed(storage=7), (7, 7)),
    (FAST, Fixed(storage=2), (2, 2)),
    (FAST, Fixed(memory=2, storage=4), (2, 4)),
    (FAST, Fixed(least=1000), (4, 1000)),
    (FAST, Fixed(memory=3, least=1000), (3, 1002)),
    (replace(FAST, snapshot=0.0), Fixed(storage=100), (1, 100)),
)
def test_fixed_intervals_are_kept(costs, fixed, expected):
    intervals = fit(costs, 0.05, fixed)
    assert (intervals.memory, intervals.storage) == expected


def test_after_a_change_of_intervals_the_next_persist_keeps_its_distance():
    rng = random.Random(8)
    for _ in range(100):
        memory, wider, anchor = rng.randint(1, 60), rng.randint(1, 60), rng.randint(0, 500)
        before = Intervals(memory, memory * rng.randint(1, 20), anchor, rng.choice([0, 100]))
        at = anchor + rng.randint(0, 2000)
        after = before.changed(wider, wider * rng.randint(1, 20), at)
        last = max((step for step in range(anchor, at + 1) if before.persists(step)), default=anchor)
        assert after.anchor == last and before.changed(4, 8, at, 50) == Intervals(4, 8, last, 50)
        following = next(step for step in range(at + 1, at + after.storage + 1) if after.persists(step))
        assert following - last >= after.storage and after.snapshots(following)


@for_each((1, 0.005, 100), (100, 0.005, 100), (101, 0.005, 0), (1, 0.05, 10), (1, 0.5, 1), (1, 60.0, 1), (2, 60.0, 0))
def test_a_block_without_saves_lasts_half_a_second_or_one_step(memory, iteration, expected):
    assert unsaved_steps(memory, iteration) == expected


@for_each((1, 2, 100), (1, 1, 1), (3, 120, 10), (7, 700, 10), (1, 101, 100), (50, 100, 100))
def test_blocks_without_saves_put_saves_off_by_no_more_than_their_length(memory, storage, unsaved):
    """None in the first nine tenths after a resume; in each cycle some; and a failure loses an interval and a block."""
    every = Intervals(memory, storage, 1000, unsaved)
    steps = range(1001, 1001 + 4 * max(every.cycle, storage))
    saves = [step for step in steps if every.snapshots(step)]
    persists = [step for step in steps if every.persists(step)]
    assert saves[0] == 1000 + memory and persists[0] == 1000 + storage and {*persists} <= {*saves}
    assert max(now - before for before, now in pairwise([1000, *saves])) <= memory + unsaved
    assert max(now - before for before, now in pairwise([1000, *persists])) <= storage + unsaved
    first = [step for step in steps if step % memory == 1000 % memory and step not in saves]
    assert not first or first[0] > 1000 + 0.8 * every.cycle
    assert len(saves) >= 0.85 * len(steps) / memory
    runs = [now - before - 1 for before, now in pairwise(saves)]
    assert storage <= unsaved or persists == [*range(1000 + storage, steps.stop, storage)]
    assert max(runs) >= min(unsaved, storage) // 2
