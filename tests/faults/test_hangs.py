"""Workers that hang: each is noticed and named, and the job goes on as if nothing had happened; the slow go on."""

import json
import os
import re
import signal
import time

from tests.faults.faults import delay, hang, stop
from tests.faults.jobs import Job, assert_all_struck, assert_as_if_nothing_had_happened

TIMEOUT = 3.0


def start(job: Job, *script: str, timeout: str = str(TIMEOUT), **options) -> Job:
    return job.start(*script, FASTCKPT_HANG_TIMEOUT=timeout, FASTCKPT_EVENTS=str(job.folder / "events"), **options)


def hangs(job: Job) -> list[dict]:
    lines = map(json.loads, (job.folder / "events").read_text().splitlines())
    return [line for line in lines if line["event"] == "hang"]


def stack_of(job: Job, rank: int, nth: int = 0) -> str:
    """What the log shows of the stacks of a rank, in the n-th hang."""
    found = re.findall(
        rf"^fastckpt-run: rank {rank} \(local.*\n((?:(?!fastckpt-run: ).*\n)*)", job.text(), re.MULTILINE
    )
    return found[nth]


def test_each_is_noticed_named_and_recovered(new_job, uninterrupted):
    job = new_job().befalls(
        stop(rank=1, at="train.step", step=11),
        hang(rank=0, at="train.step", step=23, function="take_a_lock_that_another_thread_holds"),
        hang(rank=1, at="train.step", step=35, function="loop_in_c_with_the_gil"),
    )
    assert start(job).wait() == 0, job.text()
    assert_all_struck(job)
    found = hangs(job)
    assert [line["culprits"] for line in found] == [[1], [0], [1]], job.text()
    assert "is stopped" in found[0]["reason"]
    assert "rank 0, in take_a_lock_that_another_thread_holds (" in job.text()
    assert "rank 1, in loop_in_c_with_the_gil (" in job.text()
    assert "in _engine_run_backward" in stack_of(job, 0)
    assert "cannot be had" in stack_of(job, 1), "a stopped process writes nothing"
    for nth, rank, other, function in (
        (1, 0, 1, "take_a_lock_that_another_thread_holds"),
        (2, 1, 0, "loop_in_c_with_the_gil"),
    ):
        assert f" in {function}\n" in stack_of(job, rank, nth), job.text()
        assert "in _engine_run_backward" in stack_of(job, other, nth), job.text()
    assert " in hold\n" in stack_of(job, 0, 1), "all threads are shown"
    assert all(line["silent"] > TIMEOUT for line in found)
    assert [tier for _, tier in job.resumes()] == ["", "memory", "memory", "memory"]
    assert_as_if_nothing_had_happened(job, uninterrupted())


def test_a_collective_that_one_rank_skips(new_job, uninterrupted):
    job = new_job()
    assert start(job, "--settle", "--skip-at", "20", ranks=3, restarts=2).wait() == 0, job.text()
    [found] = hangs(job)
    assert found["culprits"] == [1], job.text()
    assert "waits elsewhere than most others" in found["reason"]
    assert " in barrier\n" in stack_of(job, 0) and " in barrier\n" in stack_of(job, 2)
    assert " in barrier\n" not in stack_of(job, 1)
    assert [tier for _, tier in job.resumes()] == ["", "memory"]
    assert_as_if_nothing_had_happened(job, uninterrupted("--settle", ranks=3))


def test_the_slow_are_left_alone(new_job, uninterrupted):
    """A first step, a marked phase and a save that take longer than steps may; and a machine that stood still."""
    slow = TIMEOUT + 1
    job = new_job().befalls(
        delay(slow, at="train.step", step=1),
        delay(slow, at="snapshot.fill", step=10),
        delay(slow, at="train.evaluate", step=20),
    )
    start(job, "--evaluate-at", "20", "--wait-at", "40")
    job.wait_for_all(40)
    assert job.process is not None
    everybody = [job.process.pid, job.pid(0), job.pid(1)]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(slow)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    job.go_on(40)
    assert job.wait() == 0, job.text()
    assert_all_struck(job)
    assert hangs(job) == [], job.text()
    assert len(job.resumes()) == 1
    assert job.ends() == uninterrupted().ends()
