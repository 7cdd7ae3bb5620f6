"""Signals to agent and workers: memory is flushed in the time that clusters grant, and the code is torchrun's."""

import os
import re
import signal
import socket
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
from tests.faults.nodes import Nodes

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, as Kubernetes and Slurm have them by default."""
SLOW = 1.5
"""Seconds that a phase lasts, for signals to meet it."""
campaign = pytest.mark.campaign


AMID = {
    "training": (delay(SLOW, at="persist.write"),),
    "rendezvous": (delay(SLOW, at="launch.rendezvous"),),
    "skeleton": (delay(SLOW, at="snapshot.skeleton", step=20),),
    "commit": (delay(SLOW, at="snapshot.commit", step=20),),
    "write": (delay(SLOW, at="persist.write", step=20),),
    "rename": (delay(SLOW, at="persist.rename", step=20),),
    "tracker": (delay(SLOW, at="persist.tracker", step=20),),
    "breakpoint flush": (kill(rank=1, at="train.step", step=25), delay(SLOW, at="persist.write")),
    "load": (kill(rank=1, at="train.step", step=25), delay(SLOW, at="resume.load")),
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
    job.wait_for_storage(saved)
    job.kill_processes(0)  # rather than wait
    assert job.wait() == 1, job.text()
    assert time.monotonic() - sent < GRACE / 2


# --- workers that save once more when another has failed

LAST_SAVE = ("--apart", "--memory", "1", "--disk", "1000", "--last-save", "--wait-at", "6", "7")
DIES = delay(600, at="train.step", step=7), kill(rank=1, at="train.step", step=8)
"""Rank 1 when it has saved step 7; rank 0 saves that step when it is asked to end."""


def let_die(job: Job) -> None:
    """Let rank 1 die when it has saved step 7, and rank 0 has begun it."""
    job.wait_for_all(6)  # no earlier save is pending, for which that would be skipped
    job.go_on(6)
    job.wait_for("waiting", 7, rank=1)
    job.until(lambda: job.injected() == 1, "rank 0 is late")
    job.go_on(7)


def assert_last_save_is_resumed(job: Job, uninterrupted) -> None:
    assert job.resumes(0) == job.resumes(1) == [(0, ""), (7, "memory")], job.text()
    assert job.ends() == uninterrupted("--apart").ends()
    assert [job.losses(rank) for rank in (0, 1)] == [uninterrupted("--apart").losses(rank) for rank in (0, 1)]


def test_a_save_made_at_sigterm_is_resumed(new_job, uninterrupted) -> None:
    """Though the flush of what was the newest when the other died has begun by then."""
    job = new_job().with_faults(*DIES).start(*LAST_SAVE, FASTCKPT_STOP_GRACE="60")
    let_die(job)
    assert job.wait() == 0, job.text()
    assert_last_save_is_resumed(job, uninterrupted)


def test_workers_stopped_for_another_node_get_sigterm_first(nodes: Nodes, uninterrupted) -> None:
    job = nodes.job.with_faults(*DIES)
    nodes.start(*LAST_SAVE, FASTCKPT_STOP_GRACE="60")
    let_die(job)
    assert nodes.wait() == [0, 0], nodes.text()
    assert_last_save_is_resumed(job, uninterrupted)
    told = [[line for line in agent.text().splitlines() if "restarts left" in line] for agent in nodes.agents]
    killed = next(node for node, lines in enumerate(told) if "died" in lines[0])
    assert [len(lines) for lines in told] == [1, 1], "one line each"
    rest = r"; resumed step 7 from memory after \d+\.\d s, no step repeated, "
    died = rf"rank 1 died on {socket.gethostname()}: SIGKILL{rest}19 of 20 restarts left"
    assert re.search(died, told[killed][0])
    other = f"workers were stopped for another node, which failed or joined{rest}20 of 20 restarts left"
    assert re.search(other, told[1 - killed][0])


# --- processes that stand still


def assert_agent_answers(job: Job) -> None:
    channel = Channel(psutil.Process(job.pid(0)).environ()[AGENT_VARIABLE], 5)
    start = time.monotonic()
    answer = channel.ask(Ask())
    channel.close()
    assert isinstance(answer, Failed) and "before Hello" in answer.text
    assert time.monotonic() - start < 5


def test_saves_while_one_worker_is_stopped_are_skipped_and_name_it(new_job, uninterrupted) -> None:
    job = new_job().with_faults(stop(rank=1, at="snapshot.skeleton", step=2)).start("--apart", "--disk", "1000")
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


def test_an_agent_that_stands_still_and_a_stopped_worker_cost_a_job_nothing(new_job, uninterrupted) -> None:
    """And SIGKILL reaches the stopped, where another dies meanwhile."""
    job = new_job().with_faults(stop(rank=1, at="snapshot.commit", step=36))
    job.start("--wait-at", "21", "--wait").wait_for_all(21)
    job.send(signal.SIGSTOP)
    job.go_on(21)
    time.sleep(1)
    assert len(job.resumes()) == 1 and not job.skips(), job.text()
    job.send(signal.SIGCONT)
    job.until(lambda: job.injected() == 1 and job.is_stopped(1), "rank 1 stopped")
    assert_agent_answers(job)
    job.kill_processes(0)
    assert job.wait() == 0, job.text()
    assert job.resumes()[1:] == [(34, "memory")]
    assert_as_if_nothing_had_happened(job, uninterrupted())
    assert job.stored()[0] == 60
