"""Stages of torch.distributed.pipelining with ``stage=`` resume as they were saved, after kills and in other worlds."""

import signal
from pathlib import Path

import pytest

from tests.faults.conftest import reference_runs
from tests.faults.faults import kill
from tests.faults.jobs import Job, assert_all_injected
from tests.support.live_folders import remove_live

PROGRAM = {"program": str(Path(__file__).with_name("pipeline.py")), "FASTCKPT_PRELOAD": "auto"}
STEPS = 12
uninterrupted = reference_runs(**PROGRAM)


def survived(job: Job, reference: Job) -> None:
    assert_all_injected(job)
    assert job.ends() == reference.ends(), job.text()
    for rank in reference.ranks():
        assert job.losses(rank) == reference.losses(rank), job.text()
    assert all(line["equal"] for rank in job.ranks() for line in job.log(rank) if "equal" in line)


def test_a_killed_pipeline_resumes_with_the_same_losses_and_weights(new_job, uninterrupted):
    job = new_job().with_faults(kill(3, at="snapshot.fill", step=5), kill(0, at="overlap.commit", step=9))
    survived(job.run(ranks=4, **PROGRAM), uninterrupted(ranks=4))
    assert [tier for _, tier in job.resumes()] == ["", "memory", "memory"], job.text()


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


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("ranks", "script"), [(2, ("--plain",)), (4, ("--chunks", "2")), (2, ("--plain", "--chunks", "2"))]
)
def test_each_kind_of_pipeline_killed_in_each_phase_resumes_bit_for_bit(new_job, uninterrupted, ranks, script):
    # the first save of each launch is planned, and not copied in the background
    phases = (
        ("snapshot.plan", 1),
        ("snapshot.commit", 1),
        ("snapshot.shards", 4),
        ("overlap.copy", 7),
        ("overlap.notify", 10),
    )
    kills = [kill(i % ranks, at=phase, step=step) for i, (phase, step) in enumerate(phases)]
    kills += [kill(1, at="resume.verify"), kill(0, at="resume.load")]
    survived(new_job().with_faults(*kills).run(*script, ranks=ranks, **PROGRAM), uninterrupted(*script, ranks=ranks))
