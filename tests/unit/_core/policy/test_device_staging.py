"""A snapshot is set aside on its device only if that was seen to stall training less."""

import pytest

from fastckpt._core.policy.device_staging import TRIALS, pays


@pytest.mark.parametrize(
    ("straight", "aside", "wanted"),
    [
        ([], [], False),  # nothing is known of a straight copy
        ([0.0002, 0.0004, 0.5], [], False),  # one outlier is no stall
        ([0.1], [], True),
        ([0.1], [0.3] * (TRIALS - 1), True),  # a trial that has not ended
        ([0.1], [0.3] * TRIALS, False),
        ([0.1, 0.1, 0.1], [0.01, 0.01, 5.0], True),
        ([0.1], [0.1, 0.1], False),  # of two that stall alike, the straight one has arrived earlier
    ],
)
def test_by_stalls(straight: list[float], aside: list[float], *, wanted: bool):
    assert pays(straight, aside) is wanted
