"""Expected goodput: its values, and its limits."""

import pytest

from fastckpt._core.policy.expected_goodput import expected_goodput
from fastckpt._core.policy.frequency.intervals import Costs, Intervals


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
