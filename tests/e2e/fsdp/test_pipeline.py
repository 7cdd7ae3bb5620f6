"""Stages of torch.distributed.pipelining with ``stage=`` resume as they were saved, after kills and in other worlds."""

import signal
from pathlib import Path

from tests.faults.jobs import Job
from tests.support.live_folders import remove_live

PROGRAM = {"program": str(Path(__file__).with_name("pipeline.py")), "FASTCKPT_PRELOAD": "auto"}
STEPS = 12


def end_at(job: Job, step: int, ranks: int) -> None:
    """Launch it, and kill all of it, the agent included, once each rank has saved a step."""
    job.start("--wait", "--stop-at", str(step), ranks=ranks, restarts=0, **PROGRAM)
    for rank in range(ranks):
        job.wait_for("due", step, rank)
    job.kill_processes("agent", *range(ranks))
    assert job.wait() == -signal.SIGKILL


def test_a_pipeline_resumes_at_another_data_parallel_size_from_memory_and_storage(new_job):
    job = new_job()
    end_at(job, 4, ranks=4)
    end_at(job, 7, ranks=2)
    remove_live(job.arena())
    job.run(ranks=4, **PROGRAM)
    loaded = [[log[rank][0] for rank in log] for log in job.starts()]
    worlds = [{(each["tier"], each["world"]) for each in lines} for lines in loaded]
    assert worlds == [{("", 4)}, {("memory", 2)}, {("storage", 4)}], job.text()
    steps = [{each["loaded"] for each in lines} for lines in loaded]
    assert steps in ([{0}, {last}, {6}] for last in (3, 4)), steps  # the last save was perhaps still being copied
    assert all(each["equal"] for lines in loaded for each in lines), loaded
    assert job.stored()[0] == STEPS
