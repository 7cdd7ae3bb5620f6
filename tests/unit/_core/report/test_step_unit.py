"""The unit in which all that is reported counts steps."""

from fractions import Fraction

import pytest

from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.report.step_unit import StepUnit, stretch


@pytest.mark.parametrize(
    ("last", "per_step", "reached", "number"),
    [
        pytest.param(Telemetry(step=13, steps=13, named=13), 1, 13, 13, id="the script names each step"),
        pytest.param(Telemetry(step=33, steps=36, named=34, loaded=-1), 1, 35, 35, id="steps from 0"),
        pytest.param(Telemetry(step=20, steps=45, named=40, loaded=-1), 2, 45, 22, id="two optimizers"),
        pytest.param(Telemetry(step=40, steps=14, named=10, loaded=-1), Fraction(1, 4), 56, 56, id="accumulation"),
        pytest.param(Telemetry(step=25, steps=21, named=20, loaded=15), 2, 51, 25, id="two optimizers, resumed"),
        pytest.param(Telemetry(step=-1, steps=7), 1, 7, 7, id="nothing is named yet"),
        pytest.param(Telemetry(step=640, steps=20, named=20, loaded=-1), Fraction(1, 32), 640, 640, id="samples"),
    ],
)
def test_steps_are_counted_in_the_smaller_of_both_units(
    last: Telemetry, per_step: Fraction, reached: int, number: int
) -> None:
    unit = StepUnit.of([stretch(last)])
    assert (unit.per_step, unit.reached(last), unit.number(last)) == (per_step, reached, number)
