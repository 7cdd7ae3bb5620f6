"""Report of the demo: losses are compared bit for bit, and events that are missing are named."""

import pytest

from examples.gpt2.report import Comparison, Failure, IncompleteRecordError

REFERENCE = [{"step": step, "loss": (5.0 / step).hex(), "lr": 0.1} for step in range(1, 9)]
REFERENCE[3]["validation"] = (1.25).hex()
RESUMED = [*REFERENCE[:5], *REFERENCE[3:]]


def test_losses_are_compared_bit_for_bit_each_time_that_they_were_computed():
    losses = Comparison.of(REFERENCE, RESUMED)
    assert losses == Comparison(equal=8, steps=8, first_unequal=None)
    assert str(losses) == "equal the uninterrupted run: 8 of 8 steps bit for bit"
    for records, step in (
        ([*RESUMED, {**REFERENCE[4], "loss": (1.0 + 2**-52).hex()}], 5),
        ([*RESUMED, {**REFERENCE[3], "validation": (1.5).hex()}], 4),
        ([record for record in RESUMED if record["step"] != 7], 7),
        ([*RESUMED, {"step": 9, "loss": "0x0p+0", "lr": 0.1}], 9),
    ):
        losses = Comparison.of(REFERENCE, records)
        assert (losses.first_unequal, losses.equal) == (step, losses.steps - 1)
        assert str(losses).startswith("DIFFER")


def test_a_record_without_a_kill_is_refused_by_the_demo_report():
    with pytest.raises(IncompleteRecordError, match="no 'killed'"):
        Failure.from_events([{"event": "workers_started", "time": 0.0, "pids": {"0": 11}, "restart_count": 0}])
