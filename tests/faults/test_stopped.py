"""A worker that is suspended in the middle of a save (SIGSTOP): the others, and the agent, continue."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from fastckpt._core.config import AGENT_VARIABLE
from fastckpt._core.ipc.channel import Channel
from fastckpt._core.ipc.messages import Ask, Failed
from tests.faults.faults import stop
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened


def assert_agent_answers(job: Job) -> None:
    channel = Channel(psutil.Process(job.pid(0)).environ()[AGENT_VARIABLE], 5)
    start = time.monotonic()
    answer = channel.ask(Ask())
    channel.close()
    assert isinstance(answer, Failed) and "before Hello" in answer.text
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("phase", ["snapshot.skeleton", pytest.param("snapshot.commit", marks=pytest.mark.campaign)])
def test_saves_while_one_worker_is_stopped_are_skipped_and_name_it(new_job, uninterrupted, phase):
    job = new_job().with_faults(stop(rank=1, at=phase, step=2)).start("--apart", "--disk", "1000")
    job.wait_for("skipped", 60)
    job.until(lambda: job.is_stopped(1), "rank 1 stopped")
    assert_agent_answers(job)
    reasons = {line["skipped"]: line["reason"] for line in job.log(0) if "skipped" in line}
    assert set(reasons) == set(range(8, 61, 2)), "three slots are taken"
    assert all("step 6 waits for local rank 1 to save it, too" in reason for reason in reasons.values())
    os.kill(job.pid(1), signal.SIGCONT)
    assert job.wait() == 0, job.text()
    assert {line["skipped"] for line in job.log(1) if "skipped" in line} == set(reasons), "alike for both"
    assert_as_if_nothing_had_happened(job, uninterrupted("--apart"))
    assert job.stored() == [6]


def test_a_job_continued_after_sigstop_trains_as_if_uninterrupted(new_job, uninterrupted):
    """And one whose stopped worker is not continued recovers once another dies: SIGKILL reaches the stopped."""
    job = new_job().with_faults(
        stop(rank=1, at="snapshot.skeleton", step=12),
        stop(rank=0, at="snapshot.commit", step=24),
        stop(rank=1, at="snapshot.commit", step=36),
    )
    job.start("--wait")
    for stops, rank in enumerate((1, 0, 1), 1):
        job.until(lambda n=stops: job.injected() >= n, f"stop {stops}")
        job.until(lambda rank=rank: job.is_stopped(rank), f"rank {rank} stopped")
        time.sleep(0.3)
        assert_agent_answers(job)
        if stops < 3:
            os.kill(job.pid(rank), signal.SIGCONT)
    job.kill_processes(0)
    assert job.wait() == 0, job.text()
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted())
    assert job.resumes()[1:] == [(34, "memory")]


@pytest.mark.campaign
def test_a_worker_that_stands_still_for_90_s_is_a_hang_and_the_job_is_sound(new_job, uninterrupted):
    """With the default settings: after a minute in which no rank does anything."""
    job = new_job().with_faults(stop(rank=1, at="train.step", step=25)).start("--wait")
    job.until(lambda: job.injected() > 0 and job.is_stopped(1), "rank 1 stopped")
    pid, since = job.pid(1), time.monotonic()
    while time.monotonic() - since < 90:
        time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    assert job.wait() == 0, job.text()
    print(job.resumes(), [line for line in job.text().splitlines() if "hang" in line])
    assert job.resumes()[1:] == [(24, "memory")]
    assert "rank 1" in job.text() and "the job hangs" in job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted())


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.campaign)])
def test_an_agent_that_stands_still_costs_its_job_nothing_but_time(new_job, uninterrupted, seconds):
    job = new_job().start("--wait-at", "21", "--wait")
    job.wait_for_all(21)
    os.kill(job.process.pid, signal.SIGSTOP)
    job.go_on(21)
    time.sleep(seconds)
    os.kill(job.process.pid, signal.SIGCONT)
    assert job.wait() == 0, job.text()
    print(job.resumes(), sorted(job.skips()), job.troubles())
    assert len(job.resumes()) == 1 and not job.skips(), job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted())
    assert job.stored()[0] == 60
