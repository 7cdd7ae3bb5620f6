"""Workers that hang: each is noticed, named and recovered; slow workers are not killed."""

import os
import re
import signal
import time

from fastckpt._core.report.events import find, read
from fastckpt._core.report.report import report
from fastckpt_run import formatting
from tests.faults.faults import delay, hang, stop
from tests.faults.jobs import HERE, Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.support.json_lines import whole_lines
from tests.support.ports import free_port
from tests.unit._core.report.schema import faults

TIMEOUT = 2.5
SLOW = TIMEOUT + 0.7
STEPS = ("--steps", "30")


def start(job: Job, *script: str, timeout: str = str(TIMEOUT), **options) -> Job:
    return job.start(*script, FASTCKPT_HANG_TIMEOUT=timeout, **options)


def hangs(job: Job) -> list[dict]:
    return [line for line in whole_lines(job.events) if line["event"] == "hang"]


def stack_of(job: Job, rank: int, nth: int = 0) -> str:
    """What the log shows of the stacks of a rank, in the n-th hang."""
    found = re.findall(
        rf"^fastckpt-run: rank {rank} \(local.*\n((?:(?!fastckpt-run: ).*\n)*)", job.text(), re.MULTILINE
    )
    return found[nth]


def test_each_kind_of_hang_is_noticed_named_and_recovered(new_job, uninterrupted):
    job = new_job().with_faults(
        stop(rank=1, at="train.step", step=11),
        hang(rank=0, at="train.step", step=23, function="take_a_lock_that_another_thread_holds"),
        hang(rank=1, at="train.step", step=35, function="loop_in_c_with_the_gil"),
    )
    assert start(job).wait() == 0, job.text()
    assert_all_injected(job)
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


def test_a_collective_that_one_rank_skips_is_named_and_recovered(new_job, uninterrupted):
    job = new_job()
    assert start(job, "--settle", "--skip-at", "20", *STEPS, ranks=3, restarts=2).wait() == 0, job.text()
    [found] = hangs(job)
    assert found["culprits"] == [1], job.text()
    assert "waits elsewhere than most others" in found["reason"]
    assert " in barrier\n" in stack_of(job, 0) and " in barrier\n" in stack_of(job, 2)
    assert " in barrier\n" not in stack_of(job, 1)
    assert [tier for _, tier in job.resumes()] == ["", "memory"]
    assert_as_if_nothing_had_happened(job, uninterrupted("--settle", *STEPS, ranks=3))


def test_slow_steps_phases_and_saves_do_not_count_as_hangs(new_job, uninterrupted):
    """A first step, a marked phase and a save that take longer than steps may; and a machine that stood still."""
    job = new_job().with_faults(
        delay(seconds=SLOW, at="train.step", step=1),
        delay(seconds=SLOW, at="snapshot.fill", step=10),
        delay(seconds=SLOW, at="train.evaluate", step=20),
    )
    start(job, "--evaluate-at", "20", "--wait-at", "40")
    job.wait_for_all(40)
    assert job.process is not None
    everybody = [job.process.pid, job.pid(0), job.pid(1)]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SLOW)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    job.go_on(40)
    assert job.wait() == 0, job.text()
    assert_all_injected(job)
    assert hangs(job) == [], job.text()
    assert len(job.resumes()) == 1
    assert job.ends() == uninterrupted().ends()


def test_a_rank_of_another_node_that_loops_is_named_by_both_agents(new_job, uninterrupted):
    """Two agents of a rank each, in one checkpoint directory."""
    shape = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "two")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    jobs = new_job().with_faults(hang(1, "train.step", 23, "loop_in_c_with_the_gil")), new_job("second")
    jobs[1].faults, jobs[1].checkpoint_dir = jobs[0].faults, jobs[0].checkpoint_dir
    for job in jobs:
        launcher = (str(HERE / "launch.py"), str(job.folder), *shape, *rendezvous)
        start(job, "--out", str(jobs[0].folder), launcher=launcher)
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    odd = re.compile(
        r"1 of 2 ranks, rank 1 on host \S+, is in loop_in_c_with_the_gil \(faults\.py:\d+\); "
        r"rank 0 on host \S+ waits in backward \(train\.py:\d+\)"
    )
    for job in jobs:
        assert odd.search(job.text()), job.text()
        told = [event for event in whole_lines(job.events) if "groups" in event]
        assert told and not [fault for event in told for fault in faults(event)]
        for event in told:
            assert [(group["ranks"], group["odd"]) for group in event["groups"]] == [("1", True), ("0", False)]
    assert [1] in [line["culprits"] for job in jobs for line in hangs(job)], jobs[0].text() + jobs[1].text()
    found = report([read(path) for path in find(str(jobs[0].checkpoint_dir))])
    of_first = next(one for one in found.failures if one.node == 0)
    assert re.search(
        r", waiting for rank 1 on \S+ in loop_in_c_with_the_gil \(faults\.py:\d+\)$", formatting.failure(of_first)
    ), found.failures
    assert_as_if_nothing_had_happened(jobs[0], uninterrupted(), interval=10)
