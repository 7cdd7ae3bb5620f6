"""The optimum of Daly, beside the paper's figures; and the time between few failures."""

import pytest

from fastckpt._core.policy.frequency.failures import daly, mean_time_between
from tests.support.tables import for_each

MINUTE, HOUR = 60.0, 3600.0


@for_each((24, 117), (6, 57), (0.25, 9.1))
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
