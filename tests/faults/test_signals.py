"""Signals to agent and workers: memory is flushed in the time that clusters grant, and the code is torchrun's."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from fastckpt._core.config import AGENT_VARIABLE
from fastckpt._core.ipc.channel import Channel
from fastckpt._core.ipc.messages import Ask, Failed
from fastckpt._core.memory.telemetry import telemetry_name
from tests.faults.faults import delay, kill, stop
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, as Kubernetes and Slurm have them by default."""
SLOW = 1.5
"""Seconds that a phase lasts, for signals to meet it."""
campaign = pytest.mark.campaign


AMID = {
    "training": (delay(seconds=SLOW, at="persist.write"),),
    "rendezvous": (delay(seconds=SLOW, at="launch.rendezvous"),),
    "skeleton": (delay(seconds=SLOW, at="snapshot.skeleton", step=20),),
    "commit": (delay(seconds=SLOW, at="snapshot.commit", step=20),),
    "write": (delay(seconds=SLOW, at="persist.write", step=20),),
    "rename": (delay(seconds=SLOW, at="persist.rename", step=20),),
    "tracker": (delay(seconds=SLOW, at="persist.tracker", step=20),),
    "breakpoint flush": (kill(rank=1, at="train.step", step=25), delay(seconds=SLOW, at="persist.write")),
    "load": (kill(rank=1, at="train.step", step=25), delay(seconds=SLOW, at="resume.load")),
}
TERM_TWICE, INT_THEN_TERM = (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)
TELLING = [("training", TERM_TWICE, 0.4), ("breakpoint flush", INT_THEN_TERM, 0.05)]
PAIRS = [(phase, *pair) for phase in AMID for pair in ((TERM_TWICE, 0.0), (TERM_TWICE, 0.4), (INT_THEN_TERM, 0.05))]
PAIRS += [("training", (number,), 0.4) for number in (signal.SIGINT, signal.SIGHUP)]


@pytest.mark.parametrize(
    ("phase", "signals", "gap"), [pytest.param(*each, marks=[campaign] * (each not in TELLING)) for each in PAIRS]
)
def test_signals_in_a_phase_flush_in_time_and_end_as_under_torchrun(
    new_job, uninterrupted, phase, signals, gap
) -> None:
    flushes, trains = phase.endswith("flush"), phase == "training"
    job = new_job().with_faults(*AMID[phase])
    job.start("--disk", "1000" if flushes or trains else "10", *(["--stop-at", "37"] if trains else []))
    if trains:
        job.wait_for_all(37)
    else:
        job.until(lambda: job.injected() == len(job.faults), f"the {phase}")
    saved, sent = job.newest_saved() if job.ranks() else 0, time.monotonic()
    for number in signals:
        job.send(number)
        time.sleep(gap)
    assert not trains or job.process.poll() is None, "it ended before its flush"
    # torch handles signals once workers have been started: before that they end the agent as any process.
    assert job.wait() in ((1, -signal.SIGTERM) if phase == "rendezvous" else (1,)), job.text()
    assert SLOW * trains < time.monotonic() - sent < GRACE and job.injected() == len(job.faults)
    saved, stored = max(saved, job.newest_saved() if job.ranks() else 0), max(job.stored(), default=0)
    assert stored >= saved, job.text()
    assert not job.arena().exists()
    assert not Path("/dev/shm", telemetry_name(job.arena()).strip("/")).exists()
    job.faults.clear()
    job.run()
    assert not job.ranks() or stored in (0, *(step for step, _ in job.resumes())), job.text()
    assert not trains or job.resumes()[1:] == [(saved, "storage")]
    assert_as_if_nothing_had_happened(job, uninterrupted(), 10)


def test_workers_that_hear_no_signal_do_not_delay_the_flush(new_job) -> None:
    """One that is stopped is killed in the end, one that is deaf after the half minute that torch gives it."""
    job = new_job().start("--stop-at", "37", "--deaf", "0")
    job.wait_for_all(37)
    saved, sent = job.newest_saved(), time.monotonic()
    os.kill(job.pid(1), signal.SIGSTOP)
    job.send(signal.SIGTERM)
    job.until(lambda: job.stored()[:1] == [saved], f"step {saved} on storage")
    job.kill_processes(0)  # rather than wait
    assert job.wait() == 1, job.text()
    assert time.monotonic() - sent < GRACE / 2


# --- workers that save once more when another has failed

LAST_SAVE = ("--apart", "--memory", "1", "--disk", "1000", "--last-save", "--wait-at", "6", "7")
DIES = delay(seconds=600, at="train.step", step=7), kill(rank=1, at="train.step", step=8)
"""Rank 1 when it has saved step 7; rank 0 saves that step when it is asked to end."""


def test_a_save_made_at_sigterm_is_resumed(new_job, uninterrupted) -> None:
    """Though the flush of what was the newest when the other died has begun by then."""
    job = new_job().with_faults(*DIES).start(*LAST_SAVE, FASTCKPT_STOP_GRACE="60")
    job.wait_for_all(6)  # no earlier save is pending, for which the next would be skipped
    job.go_on(6)
    job.wait_for("waiting", 7, rank=1)
    job.until(lambda: job.injected() == 1, "rank 0 is late")
    job.go_on(7)
    assert job.wait() == 0, job.text()
    assert job.resumes(0) == job.resumes(1) == [(0, ""), (7, "memory")], job.text()
    assert job.ends() == uninterrupted("--apart").ends()
    assert [job.losses(rank) for rank in (0, 1)] == [uninterrupted("--apart").losses(rank) for rank in (0, 1)]


# --- processes that stand still


def assert_agent_answers(job: Job) -> None:
    channel = Channel(psutil.Process(job.pid(0)).environ()[AGENT_VARIABLE], 5)
    start = time.monotonic()
    answer = channel.ask(Ask())
    channel.close()
    assert isinstance(answer, Failed) and "before Hello" in answer.text
    assert time.monotonic() - start < 5


def test_an_agent_that_stands_still_and_a_stopped_worker_cost_a_job_nothing(new_job, uninterrupted) -> None:
    """And SIGKILL reaches the stopped, where another dies meanwhile."""
    job = new_job().with_faults(stop(rank=1, at="snapshot.commit", step=36))
    job.start("--wait-at", "21", "--wait").wait_for_all(21)
    job.send(signal.SIGSTOP)
    job.go_on(21)
    time.sleep(1)
    assert len(job.resumes()) == 1 and not job.skips(), job.text()
    job.send(signal.SIGCONT)
    rank_1 = psutil.Process(job.pid(1))
    job.until(lambda: job.injected() == 1 and rank_1.status() == psutil.STATUS_STOPPED, "rank 1 stopped")
    assert_agent_answers(job)
    job.kill_processes(0)
    assert job.wait() == 0, job.text()
    assert job.resumes()[1:] == [(34, "memory")]
    assert_as_if_nothing_had_happened(job, uninterrupted())
    assert job.stored()[0] == 60
