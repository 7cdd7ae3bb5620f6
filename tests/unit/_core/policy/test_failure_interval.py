"""Bounds of the mean time between failures, against published quantiles."""

import pytest

from fastckpt._core.policy.failure_interval import failure_interval
from tests.support.tables import for_each


@for_each((1, 0.0513, 4.744), (10, 5.425, 16.962), (50, 38.965, 63.287))
def test_the_bounds_of_the_mean_time_are_those_of_exact_quantiles(failures: int, low: float, high: float):
    """Bounds of a Poisson distributed number's mean at 90% of both sides (Garwood 1936)."""
    found = failure_interval(failures, 1000.0)
    assert found is not None and found.most is not None
    assert found.mean == 1000 / failures
    assert found.least == pytest.approx(1000 / high, rel=1e-3)
    assert found.most == pytest.approx(1000 / low, rel=1e-3)


def test_no_failure_gives_a_lower_bound_alone():
    found = failure_interval(0, 2302.585)
    assert found is not None and (found.mean, found.most) == (None, None)
    assert found.least == pytest.approx(1000, rel=1e-6)  # exp(-2.302585) is 10%
    assert failure_interval(0, 0.0) is None
