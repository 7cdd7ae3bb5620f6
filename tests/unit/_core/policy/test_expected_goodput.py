"""Expected goodput: its values, and its limits."""

import pytest

from fastckpt._core.policy.expected_goodput import expected_goodput
from fastckpt._core.policy.frequency.intervals import Costs, Intervals
from fastckpt.errors import ConfigError


@pytest.mark.parametrize(
    ("costs", "intervals", "restart", "mtbf", "memory", "storage"),
    [
        (Costs(0.2, 0.01, 0.05, 0.4), Intervals(2, 10), 1.0, 100.0, 0.9409258899724977, 0.9293140560633325),
        (Costs(0.5, 0.2, 0.0, 2.0), Intervals(10, 40), 3.0, 20.0, 0.724672250368722, 0.42575636294717195),
        (Costs(0.1, 0.0, 0.0, 0.0), Intervals(1, 1), 0.0, 2000.0, 0.9999750002083333, 0.9999750002083333),
    ],
)
def test_expected_goodput_is_that_of_jobs_that_fail_at_random(costs, intervals, restart, mtbf, memory, storage):
    """Within 5% of these values were jobs of 20,000 steps that failed at random instants, also amid a restart."""
    found = expected_goodput(costs, intervals, restart, mtbf)
    assert (found.memory, found.storage) == (pytest.approx(memory, rel=1e-9), pytest.approx(storage, rel=1e-9))


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
