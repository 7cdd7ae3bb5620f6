"""Counts of steps over restarts of workers, and with several checkpoint directories for each."""

from typing import Any

import pytest

from fastckpt._core.memory.telemetry import STEP_BOUNDS, Telemetry
from fastckpt_run.watch.step_counts import StepCounts

BUCKETS = len(STEP_BOUNDS) + 1


def worker(steps: int, *, generation: int = 0, pid: int = 10, **more: Any) -> Telemetry:
    """Each step but the first took a millisecond, of which the wait was half."""
    durations = (max(0, steps - 1), *(0,) * (BUCKETS - 1))
    parts = (steps * 100_000, steps * 200_000, steps * 100_000, steps * 100_000, steps * 500_000)
    given = {"beat": 1000 * generation + steps + 1, "stepping": max(0, steps - 1) * 1_000_000} | more
    return Telemetry(generation=generation, steps=steps, pid=pid, durations=durations, parts=parts, **given)


def counted(*looks: dict[str, list[Telemetry]]) -> tuple[int, float]:
    counts = StepCounts()
    for look in looks:
        counts.look(look)
    found = counts.histogram
    return sum(found.counts), found.total


def looks(*pairs):
    return [{name: [each] for name, each in zip("ab", pair, strict=False)} for pair in pairs]


LEFT_OPEN = looks([worker(5), worker(4)], [worker(6, pid=0), worker(5)], [worker(6, pid=0), worker(9)])
SEEN = {
    "restarted between two looks": (looks([worker(5)], [worker(9, generation=1)]), 4 + 8),
    "not reported yet, and left": (looks([Telemetry()], [worker(5)], *[[worker(5, pid=0)]] * 2), 4),
    "two checkpointers that see the same steps": (looks(*([worker(n)] * 2 for n in (2, 5, 9))), 8),
    "one checkpointer is left open where another was closed": (LEFT_OPEN, 5 + 4),
    "another directory": (looks([worker(5)], *([worker(5), worker(n, generation=1)] for n in (3, 6))), 4 + 5),
}


def test_each_step_of_a_worker_is_counted_once_and_those_of_its_successor_are_added():
    before, after = [worker(5), worker(7)], [worker(3, generation=1), worker(2, generation=1)]
    assert counted({"/a": before}, {"/a": before}, {"/a": after}) == (4 + 6 + 2 + 1, pytest.approx(0.013))
    assert {name: counted(*seen)[0] for name, (seen, _) in SEEN.items()} == {name: n for name, (_, n) in SEEN.items()}


def test_parts_are_means_of_the_last_steps_and_stay_when_there_are_none():
    counts = StepCounts()
    assert counts.parts(0) == ()
    for steps in (1, 11, 11):
        counts.look({"/a": [worker(steps)]})
    assert counts.parts(0) == pytest.approx((1e-4, 2e-4, 1e-4, 1e-4, 5e-4))
    counts.look({"/a": [worker(11)]})
    assert counts.parts(0)[4] == pytest.approx(5e-4)
