"""Durations of steps, measured from the telemetry of workers."""

import pytest

from fastckpt._core.memory.telemetry import Telemetry
from fastckpt_run.hangs.step_times import StepTimes
from tests.support.tables import for_each


def line(steps: int, beat: float, *, stepping: float = 2.0, phase: str = "") -> Telemetry:
    """A rank whose first step was complete after a second, and whose others have taken ``stepping`` seconds."""
    spent = int(stepping * 1e9)
    return Telemetry(pid=1, steps=steps, beat=int(beat * 1e9), first=11 * 10**9, phase=phase, stepping=spent)


def slowest(*lines: Telemetry) -> float:
    times = StepTimes()
    times.begin(10.0)
    for each in lines:
        times.see({0: each})
    return times.slowest(lines[-1].beat / 1e9)


@for_each(
    ([line(0, 10.5)], 0.0),
    ([line(1, 11.0)], 0.0),  # the first step is not representative
    ([line(5, 13.0)], 0.0),  # nor are a few
    ([line(21, 13.0)], 0.1),  # all of them before the first look, and none after it
    ([line(21, 3600.0)], 0.1),  # but for a phase of an hour
    ([line(21, 13.0), line(21, 13.0)], 0.1),
    ([line(21, 13.0), line(22, 14.0)], 1.0),
    ([line(1, 11.0), line(3, 15.0), line(4, 15.5)], 2.0),
    ([line(3, 15.0, phase="evaluate")], 0.0),
)
def test_the_slowest_step_is_measured_from_the_first_look_on(lines, seconds):
    assert slowest(*lines) == pytest.approx(seconds, rel=0.01)
