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


def test_a_restarted_worker_adds_to_what_its_predecessor_did():
    before, after = [worker(5), worker(7)], [worker(3, generation=1), worker(2, generation=1)]
    assert counted({"/a": before}, {"/a": before}, {"/a": after}) == (4 + 6 + 2 + 1, pytest.approx(0.013))


def test_a_worker_that_was_restarted_between_two_looks_is_counted_from_its_begin():
    assert counted({"/a": [worker(5)]}, {"/a": [worker(9, generation=1)]})[0] == 4 + 8


def test_a_worker_that_has_not_reported_yet_and_one_that_left_add_nothing():
    left = worker(5, pid=0)
    assert counted({"/a": [Telemetry()]}, {"/a": [worker(5)]}, {"/a": [left]}, {"/a": [left]})[0] == 4


def test_steps_that_two_checkpointers_of_a_worker_see_are_counted_once():
    looks = [{"/a": [worker(n)], "/b": [worker(n)]} for n in (2, 5, 9)]
    assert counted(*looks)[0] == 8


def test_a_checkpointer_that_is_left_open_goes_on_where_another_was_closed():
    both, closed = {"/a": [worker(5)], "/b": [worker(4)]}, {"/a": [worker(6, pid=0)], "/b": [worker(5)]}
    later = {"/a": [worker(6, pid=0)], "/b": [worker(9)]}
    assert counted(both, closed, later)[0] == 5 + 4


def test_a_restarted_worker_with_another_directory_is_counted_there():
    """What its predecessor reported stays in the block of the first."""
    old = worker(5)
    looks = [{"/a": [old]}, {"/a": [old], "/b": [worker(3, generation=1)]}]
    looks.append({"/a": [old], "/b": [worker(6, generation=1)]})
    assert counted(*looks)[0] == 4 + 5


def test_parts_are_means_of_the_last_steps_and_stay_when_there_are_none():
    counts = StepCounts()
    assert counts.parts(0) == ()
    for steps in (1, 11, 11):
        counts.look({"/a": [worker(steps)]})
    assert counts.parts(0) == pytest.approx((1e-4, 2e-4, 1e-4, 1e-4, 5e-4))
    counts.look({"/a": [worker(11)]})
    assert counts.parts(0)[4] == pytest.approx(5e-4)


def test_parts_that_are_not_measured_are_not_known():
    counts = StepCounts()
    for steps in (1, 11):
        counts.look({"/a": [Telemetry(steps=steps, pid=1, beat=steps)]})
    assert counts.parts(0) == () and sum(counts.histogram.counts) == 0
