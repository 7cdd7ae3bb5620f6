"""Report of the demo: losses are compared bit for bit, and events that are missing are named."""

import pytest

from examples.gpt2.report import Comparison, Failure, IncompleteRecordError

REFERENCE = [{"step": step, "loss": (5.0 / step).hex(), "lr": 0.1} for step in range(1, 9)]
REFERENCE[3]["validation"] = (1.25).hex()
RESUMED = [*REFERENCE[:5], *REFERENCE[3:]]


def test_losses_computed_twice_must_be_equal_each_time():
    losses = Comparison.of(REFERENCE, RESUMED)
    assert losses == Comparison(equal=8, steps=8, first_unequal=None)
    assert str(losses) == "equal the uninterrupted run: 8 of 8 steps bit for bit"


@pytest.mark.parametrize(
    ("records", "step"),
    [
        ([*RESUMED, {**REFERENCE[4], "loss": (1.0 + 2**-52).hex()}], 5),
        ([*RESUMED, {**REFERENCE[3], "validation": (1.5).hex()}], 4),
        ([record for record in RESUMED if record["step"] != 7], 7),
        ([*RESUMED, {"step": 9, "loss": "0x0p+0", "lr": 0.1}], 9),
    ],
    ids=["one bit of one repeated step", "validation", "a step is missing", "a step too many"],
)
def test_the_demo_report_names_any_difference_of_losses(records, step):
    losses = Comparison.of(REFERENCE, records)
    assert losses.first_unequal == step
    assert losses.equal == losses.steps - 1
    assert str(losses).startswith("DIFFER")


def test_workers_that_resumed_unlike_steps_are_refused_by_the_demo_report():
    killed = {"event": "killed", "time": 7.0, "local_rank": 1, "victim": 12}
    events = [
        {"event": "workers_started", "time": 0.0, "pids": {"0": 11, "1": 12}, "restart_count": 0},
        *({"event": "step", "time": 3.0 + step, "step": step, "rank": r} for step in range(1, 4) for r in (0, 1)),
        killed,
        {"event": "worker_died", "time": 7.1, "local_rank": 1, "rank": 1, "exitcode": -9},
        {"event": "workers_stopped", "time": 7.2},
        {"event": "flush_started", "time": 7.3, "step": 3},
        {"event": "workers_started", "time": 7.4, "pids": {"0": 21, "1": 22}, "restart_count": 1},
        {"event": "flush_done", "time": 7.5, "step": 3, "bytes": 3_500_000, "seconds": 0.09},
        {"event": "resumed", "time": 9.1, "step": 3, "tier": "memory", "rank": 0, "seconds": 0.01},
        *({"event": "step", "time": 5.4 + step, "step": step, "rank": r} for step in range(4, 9) for r in (0, 1)),
    ]
    with pytest.raises(IncompleteRecordError, match="no 'killed'"):
        Failure.from_events([event for event in events if event is not killed])
    with pytest.raises(IncompleteRecordError, match="1 of 2 workers"):
        Failure.from_events(events)
    with pytest.raises(IncompleteRecordError, match="resumed differently"):
        Failure.from_events([*events, {"event": "resumed", "time": 9.2, "step": 2, "tier": "memory", "rank": 1}])
