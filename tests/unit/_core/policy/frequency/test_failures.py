"""The optimum of Daly, beside the paper's figures and its complete model; and the time between few failures."""

from math import exp, factorial

import pytest

from fastckpt._core.policy.frequency.failures import CONFIDENCE, daly, mean_time_between

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_optimum_equals_the_figures_of_dalys_paper(hours, minutes):
    """Figures 3 to 5 of the paper: a cost of 5 minutes."""
    assert daly(5 * MINUTE, hours * HOUR) / MINUTE == pytest.approx(minutes, abs=0.5)


def test_a_checkpoint_that_costs_more_than_the_time_between_failures_has_an_optimum():
    assert daly(2000, 1000) == daly(1e9, 1000) == 1000
    assert daly(1999.9, 1000) == pytest.approx(1000, rel=0.15)
    assert daly(0, 1000) == 0


def test_few_failures_give_a_cautious_time_between_failures():
    assert mean_time_between(0, 1e6) is None
    assert mean_time_between(3, 0) is None
    assert mean_time_between(1, HOUR) == pytest.approx(HOUR / 3, rel=0.02)


@pytest.mark.parametrize("failures", [1, 3, 100])
def test_the_bound_is_that_of_the_poisson_distribution(failures):
    expected = 1000.0 / mean_time_between(failures, 1000.0)
    at_most = sum(exp(-expected) * expected**k / factorial(k) for k in range(failures + 1))
    assert at_most == pytest.approx(1 - CONFIDENCE, abs=0.005)
