"""Report of the demo on recorded events: the timeline, the comparison, and missing events."""

import pytest

from examples.gpt2.demo import step_to_kill
from examples.gpt2.report import Comparison, Failure, IncompleteRecordError
from examples.gpt2.run import DemoError

RECORDED = [
    {"event": "workers_started", "time": 100.0, "pids": {"0": 11, "1": 12}, "restart_count": 0},
    *({"event": "step", "time": 103.0 + step, "step": step, "rank": r} for step in range(1, 5) for r in (0, 1)),
    {"event": "saved", "time": 106.2, "step": 3, "rank": 0},
    {"event": "killed", "time": 107.1, "local_rank": 1, "victim": 12},
    {"event": "step", "time": 107.102, "step": 5, "rank": 0},
    {"event": "worker_died", "time": 107.11, "local_rank": 1, "rank": 1, "exitcode": -9},
    {"event": "workers_stopped", "time": 107.15},
    {"event": "flush_started", "time": 107.16, "step": 3},
    {"event": "workers_started", "time": 107.2, "pids": {"0": 21, "1": 22}, "restart_count": 1},
    {"event": "flush_done", "time": 107.25, "step": 3, "bytes": 3_500_000, "seconds": 0.09},
    {"event": "resumed", "time": 109.0, "step": 3, "tier": "memory", "rank": 1, "seconds": 0.01},
    {"event": "resumed", "time": 109.1, "step": 3, "tier": "memory", "rank": 0, "seconds": 0.01},
    *({"event": "step", "time": 105.4 + step, "step": step, "rank": r} for step in range(4, 9) for r in (0, 1)),
]
REFERENCE = [{"step": step, "loss": (5.0 / step).hex(), "lr": 0.1} for step in range(1, 9)]
REFERENCE[3]["validation"] = (1.25).hex()
RESUMED = [*REFERENCE[:5], *REFERENCE[3:]]


def without(name: str, after: float = 0.0) -> list[dict]:
    return [event for event in RECORDED if event["event"] != name or event["time"] < after]


def test_the_timeline_of_the_demo_report_starts_at_the_kill():
    failure = Failure.from_events(RECORDED[::-1])
    assert (failure.local_rank, failure.last_step, failure.resumed_step, failure.tier) == (1, 5, 3, "memory")
    assert failure.repeated == range(4, 6)
    assert failure.back == pytest.approx(2.3)
    assert [text for _, text in failure.moments] == [
        "worker 1 (pid 12) is killed by SIGKILL",
        "the agent notices that worker 1 has died",
        "all workers are stopped",
        "flush of step 3 from memory to storage begins",
        "workers are started again, as pids [21, 22]",
        "flush is done: step 3, 3.5 MB",
        "all workers have resumed at step 3 from memory",
        "first step after the failure is done: step 4",
    ]
    seconds = [seconds for seconds, _ in failure.moments]
    assert seconds == pytest.approx([0, 0.01, 0.05, 0.06, 0.1, 0.15, 2.0, 2.3])


@pytest.mark.parametrize("name", ["killed", "flush_done", "workers_started"])
def test_the_demo_report_names_events_that_the_record_lacks(name):
    with pytest.raises(IncompleteRecordError, match=f"no '{name}'"):
        Failure.from_events(without(name, after=107.0))
    events = [dict(event) for event in RECORDED]
    del next(event for event in events if event["event"] == "flush_done")["bytes"]
    with pytest.raises(IncompleteRecordError, match="'flush_done' has no 'bytes'"):
        Failure.from_events(events)


def test_workers_that_resumed_unlike_steps_are_refused_by_the_demo_report():
    one = [event for event in RECORDED if event["event"] != "resumed" or event["rank"] == 0]
    with pytest.raises(IncompleteRecordError, match="1 of 2 workers"):
        Failure.from_events(one)
    other = [*one, {"event": "resumed", "time": 109.2, "step": 2, "tier": "memory", "rank": 1}]
    with pytest.raises(IncompleteRecordError, match="resumed differently"):
        Failure.from_events(other)


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


@pytest.mark.parametrize(("steps", "memory", "storage"), [(200, 5, 50), (40, 3, 20)])
def test_the_demo_kills_at_a_step_with_unsaved_and_remaining_work(steps, memory, storage):
    for _ in range(20):
        step = step_to_kill(steps, memory, storage)
        assert steps // 4 <= step < 3 * steps // 4
        assert step % storage >= 2 * memory
    with pytest.raises(DemoError, match="memory is never newer than storage"):
        step_to_kill(steps=20, memory=5, storage=5)
