"""Stages of torch.distributed.pipelining with ``stage=`` resume as they were saved, after kills and in other worlds."""

import signal
from pathlib import Path

from tests.faults.faults import kill
from tests.faults.jobs import Job, assert_all_injected

PROGRAM = {"program": str(Path(__file__).with_name("pipeline.py")), "FASTCKPT_PRELOAD": "auto"}
STEPS = 12


def end_at(job: Job, step: int, ranks: int) -> None:
    """Launch it, and kill all of it, the agent included, once each rank has saved a step."""
    job.start("--stop-at", str(step), ranks=ranks, restarts=1, **PROGRAM)
    for rank in range(ranks):
        job.wait_for("due", step, rank)
    job.kill_processes("agent", *range(ranks))
    assert job.wait() == -signal.SIGKILL


def test_a_killed_pipeline_resumes_from_memory_and_storage_at_other_data_parallel_sizes_too(new_job):
    """Each step that is repeated by as many ranks has the losses, and leaves the whole state, that it had before."""
    job = new_job().with_faults(kill(3, at="snapshot.fill", step=3), kill(0, at="overlap.commit", step=6))
    end_at(job, 4, ranks=4)
    end_at(job, 8, ranks=2)
    job.lose_memory()
    job.run(ranks=4, **PROGRAM)
    assert_all_injected(job)
    starts = job.starts()
    loaded = [{(log[0]["tier"], log[0]["world"], log[0]["loaded"]) for log in logs.values()} for logs in starts]
    # the save before a kill was perhaps still being copied
    assert [[each[:2] for each in found] for found in loaded] == [
        [("", 4)], [("memory", 4)], [("memory", 2)], [("memory", 2)], [("storage", 4)]
    ], job.text()  # fmt: skip
    steps = [step for [(*_, step)] in loaded]
    assert steps[:2] == [0, 2] and steps[2] in (3, 4) and steps[3] in (4, 5) and steps[4] == 6, steps
    assert all(log[0]["equal"] for logs in starts for log in logs.values()), loaded
    losses = [
        {(rank, line["step"]): line["loss"] for rank in logs for line in logs[rank] if "loss" in line}
        for logs in starts
    ]
    for before, now in (losses[:2], losses[2:4]):
        repeated = before.keys() & now.keys()
        assert repeated and all(before[each] == now[each] for each in repeated), job.text()
    assert job.stored()[0] == STEPS
