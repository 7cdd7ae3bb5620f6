"""The exponents of the benchmark of growth: recovered from laws that are known, with a constant and with noise."""

import pytest

from benchmarks.suite._power_law import fitted

AXIS = (0.1, 0.3, 1, 2, 4)


@pytest.mark.parametrize("exponent", [0.5, 1, 2])
@pytest.mark.parametrize("constant", [0.0, 0.3, 5.0])
def test_the_exponent_of_a_cost_is_that_beyond_its_constant(exponent: float, constant: float):
    law = fitted([(x, constant + 2 * x**exponent) for x in AXIS])
    assert law.exponent == pytest.approx(exponent)
    assert law.constant == pytest.approx(constant, abs=0.01)


@pytest.mark.parametrize("noise", [(1, 1.1, 0.95, 1.05, 1), (1, 1, 1, 1, 1.2), (1.2, 1, 1, 1, 1), (2, 1.5, 1, 1, 1)])
def test_a_cost_that_hardly_grows_is_flat(noise: tuple[float, ...]):
    assert fitted([*zip(AXIS, noise, strict=True)])[1:] == (0.0, 0.0)
