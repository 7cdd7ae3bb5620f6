"""Frequency of saves while their cost is measured, as a table."""

import pytest

from fastckpt._core.policy.frequency.intervals import FREE, LONGEST, Fixed
from fastckpt._core.policy.frequency.profiling import FEWEST, Profile
from fastckpt._core.policy.frequency.provisional_intervals import provisional

OVERHEAD = 0.035


def known(stall: float = 0.0, duration: float = 0.0, *, compared: bool = False) -> Profile:
    """What has been measured so far."""
    return Profile(1.0, stall, duration, plain=FEWEST if compared else 0)


@pytest.mark.parametrize(
    ("turn", "profile", "fixed", "expected"),
    [
        (None, None, FREE, (1, LONGEST)),
        (0.5, None, FREE, (2, 60)),
        (0.5, known(stall=0.5), FREE, (10, 60)),
        (0.5, known(stall=60.0), FREE, (600, 600)),
        (0.001, known(stall=0.9), FREE, (5000, 30000)),
        (3.0, None, FREE, (1, 10)),
        (20.0, known(stall=3.0), FREE, (1, 1)),
        (0.5, known(duration=20.0), FREE, (2, 80)),
        (0.5, known(stall=0.001, compared=True), FREE, (1, 60)),
        (0.5, None, Fixed(memory=1), (1, 60)),
        (0.5, known(stall=0.1), Fixed(storage=10), (6, 6)),
    ],
)
def test_provisional_intervals_follow_from_iteration_and_save_times(turn, profile, fixed, expected):
    found = provisional(turn, profile, OVERHEAD, fixed)
    assert (found.memory, found.storage) == expected
