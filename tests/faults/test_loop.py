"""`fastckpt.Checkpointer` in real jobs: the very same results after kills, however often these come."""

import signal
from collections.abc import Callable
from itertools import pairwise

import pytest

from fastckpt._core.report.events import find, read
from tests.faults.jobs import Job
from tests.unit._core.report.schema import faults

LINES = "programs/lines.py"
EPOCHS, STEPS = 2, 24


@pytest.fixture
def reference(uninterrupted: Callable[..., Job]) -> Job:
    return uninterrupted(program=LINES)


def steps_of(job: Job) -> list[int]:
    """What each start of rank 0 went on from."""
    return [step for step, _ in job.resumes()]


def decided(job: Job) -> list[dict]:
    """What the logs of agents beside the checkpoints say of how often to save, launch after launch."""
    logs = [read(path) for path in find(str(job.checkpoint_dir))]
    found = [event for log in logs for event in log.events if event["event"] == "frequency"]
    assert not [fault for event in found for fault in faults(event)]
    return found


def test_kills_of_ranks_and_agents_leave_the_results_of_a_loop_unchanged(short_path, new_job, reference):
    options = {"program": LINES, "restarts": 3, "TMPDIR": short_path}
    job = new_job().start("--loader-workers", "1", **options)
    job.wait_for("step", 9)
    job.kill_processes(1)
    job.until(lambda: len(steps_of(job)) == 2, "a second start")
    job.wait_for("step", STEPS // 2 + 5)
    job.kill_processes(0)
    assert job.wait() == 0, job.text()
    assert job.ends() == reference.ends(), job.text()
    assert [job.losses(rank) for rank in (0, 1)] == [reference.losses(rank) for rank in (0, 1)], job.text()
    assert reference.stored()[0] == STEPS and STEPS // EPOCHS in reference.stored(), "ends of epochs and jobs are kept"
    assert len(steps_of(job)) == 3
    assert steps_of(job)[1] > 0, job.text()
    said = decided(job)
    assert (said[0]["step"], said[0]["memory"], said[0]["bound"]) == (0, None, 0.035)
    assert "nothing is known" in said[0]["why"]
    assert len(said) >= 3 and {each["step"] for each in said} >= {step for step in steps_of(job) if not step}


def test_a_job_killed_more_often_than_its_profile_takes_completes_it(new_job):
    """Each run ends after 8 steps; a profile by one run alone takes 8 without a save before its first."""
    paced = ("--step-seconds", "0.15", "--epochs", "40")
    job = new_job().start(*paced, program=LINES, restarts=25)
    for number in range(1, 22):
        job.until(lambda number=number: len(job.resumes()) == number, f"start {number}")
        job.wait_for("step", steps_of(job)[-1] + 8)
        chosen = [each for each in decided(job) if each["memory"] is not None]
        if chosen:
            break
        job.kill_processes(1)
    assert chosen, job.text()
    assert number > 1, "a run that was not killed took it all"
    assert [before < now for before, now in pairwise(steps_of(job))] == [True] * (number - 1), steps_of(job)
    assert {tier for _, tier in job.resumes()[1:]} == {"memory"}
    whys = [each["why"] for each in decided(job) if each["memory"] is None]
    assert any("profiling goes on: runs before this one measured" in why for why in whys), whys
    job.send(signal.SIGTERM)  # so that it leaves no memory
    job.wait()
