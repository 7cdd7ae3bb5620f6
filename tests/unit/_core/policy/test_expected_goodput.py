"""Expected goodput: against jobs that fail at random instants, step by step, and at its limits."""

import random

import pytest

from fastckpt._core.policy.expected_goodput import expected_goodput
from fastckpt._core.policy.frequency.intervals import Costs, Intervals
from fastckpt.errors import ConfigError


def simulated(costs: Costs, intervals: Intervals, restart: float, mtbf: float, *, storage: bool, seed: int) -> float:
    """The goodput of a job that takes steps and saves, and fails at random; after a failure it is back at a save."""
    rng = random.Random(seed)
    now, step, best, durable = 0.0, 0, 0, list[tuple[float, int]]()
    failure, useful = rng.expovariate(1 / mtbf), 0
    while useful < 20_000:
        took = costs.iteration
        if (step + 1) % intervals.memory == 0:
            took += costs.snapshot
        if (step + 1) % intervals.storage == 0:
            took += costs.persist
        if now + took <= failure:
            now, step = now + took, step + 1
            useful = max(useful, step)
            if step % intervals.memory == 0:
                best = step
            if step % intervals.storage == 0:
                durable.append((now + costs.duration, step))
            continue
        now = failure
        arrived = [at for when, at in durable if when <= now]
        step = max(arrived, default=0) if storage else best
        best, durable = step, [(0.0, step)]
        while True:  # failures during a restart begin it again
            failure = now + rng.expovariate(1 / mtbf)
            if failure > now + restart:
                now += restart
                break
            now = failure
    return useful * costs.iteration / now


@pytest.mark.parametrize(
    ("costs", "intervals", "restart", "mtbf"),
    [
        (Costs(0.2, 0.01, 0.05, 0.4), Intervals(2, 10), 1.0, 100.0),
        (Costs(0.5, 0.2, 0.0, 2.0), Intervals(10, 40), 3.0, 20.0),
        (Costs(0.1, 0.0, 0.0, 0.0), Intervals(1, 1), 0.0, 2000.0),
    ],
)
def test_expected_goodput_is_that_of_simulated_jobs(costs, intervals, restart, mtbf):
    found = expected_goodput(costs, intervals, restart, mtbf)
    for storage, expected in ((False, found.memory), (True, found.storage)):
        runs = [simulated(costs, intervals, restart, mtbf, storage=storage, seed=seed) for seed in range(3)]
        assert expected == pytest.approx(sum(runs) / len(runs), rel=0.05)


def test_rare_failures_leave_the_cost_of_saves():
    found = expected_goodput(Costs(1.0, 0.1, 0.2, 1.0), Intervals(1, 2), 5.0, 1e9)
    assert found.without == pytest.approx(2 / 2.4)
    assert found.memory == pytest.approx(found.without, rel=1e-6)


def test_failures_that_come_before_any_save_leave_nothing():
    found = expected_goodput(Costs(1.0, 0.0), Intervals(10**6, 10**6), 0.0, 1.0)
    assert found.memory == 0.0 == found.storage


@pytest.mark.parametrize(("restart", "mtbf"), [(-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_impossible_times_are_refused(restart: float, mtbf: float):
    with pytest.raises(ConfigError, match="give 0 or more"):
        expected_goodput(Costs(1.0, 0.1), Intervals(1, 1), restart, mtbf)
