"""Signals to agent and workers: memory is flushed in the time that clusters grant, and the code is torchrun's."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fastckpt._core.config import AGENT_VARIABLE
from fastckpt._core.ipc.channel import Channel
from fastckpt._core.ipc.messages import Ask, Failed
from fastckpt._core.memory.telemetry import telemetry_name
from tests.faults.faults import delay, kill, stop
from tests.faults.jobs import TORCHRUN, Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.nodes import Nodes

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, as Kubernetes and Slurm have them by default."""
SLOW = 1.5
"""Seconds that a phase lasts, for signals to meet it."""
campaign = pytest.mark.campaign


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with two workers that sleep."""
    command = [sys.executable, *TORCHRUN, "--no-python", "sleep", "600"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        while sum(child.name() == "sleep" for child in psutil.Process(process.pid).children()) < 2:
            time.sleep(0.05)
        yield process
        process.terminate()


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGTERM, signal.SIGTERM], *(pytest.param([n], marks=campaign) for n in (signal.SIGINT, signal.SIGHUP))],
    ids=lambda signals: "-".join(number.name for number in signals),
)
def test_a_signal_flushes_and_ends_as_under_torchrun(new_job, uninterrupted, torchrun, signals) -> None:
    job = new_job().with_faults(delay(SLOW, at="persist.write")).start("--stop-at", "37", "--disk", "1000")
    job.wait_for_all(37)
    saved, sent = job.newest_saved(), time.monotonic()
    torchrun.send_signal(signals[0])
    for number in signals:
        job.send(number)
        time.sleep(0.5)
    assert job.process.poll() is None, "it ended before its flush"
    assert job.wait() == torchrun.wait(60), job.text()
    assert SLOW < time.monotonic() - sent < GRACE
    assert job.injected() == 1 and job.stored()[0] == saved
    assert not job.arena().exists()
    assert not Path("/dev/shm", telemetry_name(job.arena()).strip("/")).exists()
    job.run()
    assert job.resumes()[1:] == [(saved, "storage")]
    assert_as_if_nothing_had_happened(job, uninterrupted())


AMID = {
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
TELLING = ("breakpoint flush", INT_THEN_TERM, 0.05)
PAIRS = [(phase, *pair) for phase in AMID for pair in ((TERM_TWICE, 0.0), (TERM_TWICE, 0.4), (INT_THEN_TERM, 0.05))]


@pytest.mark.parametrize(
    ("phase", "pair", "gap"), [pytest.param(*each, marks=[campaign] * (each != TELLING)) for each in PAIRS]
)
def test_two_signals_in_a_phase_lose_nothing(new_job, uninterrupted, phase, pair, gap) -> None:
    job = new_job().with_faults(*AMID[phase]).start("--disk", "1000" if phase == "breakpoint flush" else "10")
    job.until(lambda: job.injected() == len(job.faults), f"the {phase}")
    for number in pair:
        job.send(number)
        time.sleep(gap)
    # torch handles signals once workers have been started: before that they end the agent as any process.
    assert job.wait() in ((1, -signal.SIGTERM) if phase == "rendezvous" else (1,)), job.text()
    saved, stored = job.newest_saved() if job.ranks() else 0, max(job.stored(), default=0)
    assert stored >= saved, job.text()
    assert not job.arena().exists()
    job.faults.clear()
    job.run()
    assert not job.ranks() or stored in (0, *(step for step, _ in job.resumes())), job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted(), 10)


@pytest.mark.parametrize("way", ["stopped", "deaf"])
def test_a_worker_that_hears_no_signal_does_not_delay_the_flush(new_job, way: str) -> None:
    """It is killed in the end, after the half minute that torch gives it; by then memory is on storage."""
    job = new_job().start("--stop-at", "37", *(["--deaf"] if way == "deaf" else []))
    job.wait_for_all(37)
    saved, sent = job.newest_saved(), time.monotonic()
    if way == "stopped":
        os.kill(job.pid(1), signal.SIGSTOP)
    job.send(signal.SIGTERM)
    job.wait_for_storage(saved)
    assert time.monotonic() - sent < GRACE / 2
    for rank in (0, 1) if way == "deaf" else ():
        os.kill(job.pid(rank), signal.SIGKILL)  # rather than wait
    assert job.wait() == 1, job.text()
    assert time.monotonic() - sent < GRACE / 2


def test_a_launch_after_a_good_end_or_the_loss_of_memory_resumes_storage(new_job, uninterrupted) -> None:
    job = new_job().run("--steps", "27", "--wait")
    saved = job.newest_saved()
    assert job.stored()[0] == saved == 26 and not job.arena().exists()
    job.start("--stop-at", "37", "--wait").wait_for_all(37)
    job.send(signal.SIGKILL)
    job.wait()
    assert job.arena().is_dir()
    job.lose_memory()
    job.run()
    assert job.resumes(0) == job.resumes(1) == [(0, ""), (26, "storage"), (30, "storage")]
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=10)


# --- workers that save once more when another has failed


LAST_SAVE = """
import argparse, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from fastckpt.ddp import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--checkpoint-dir")
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
checkpointer = DdpCheckpointer(args.checkpoint_dir)

def save(step):
    result = checkpointer.save_checkpoint(step, {"model": torch.full((1000,), step)}, storage_type=StorageType.MEMORY)
    assert result.saved, result.reason

def save_and_end(number, frame):
    save(7)
    sys.exit()

state = checkpointer.load_checkpoint()
with (args.out / f"loaded.{rank}").open("a") as log:
    print(checkpointer.loaded_step, checkpointer.loaded_from, state["model"][0].item() if state else "", file=log)
if not state:
    for step in range(1, 7):
        save(step)
        dist.barrier()
    if rank == 0:
        signal.signal(signal.SIGTERM, save_and_end)
    dist.barrier()
    if rank == 1:
        save(7)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
dist.barrier()
checkpointer.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Ranks of which 1 is killed when it has saved step 7, and 0 saves that step when it is asked to end."""
    path = tmp_path / "last_save.py"
    path.write_text(LAST_SAVE)
    return str(path)


def loads(folder: Path) -> list[list[str]]:
    return [(folder / f"loaded.{rank}").read_text().splitlines() for rank in (0, 1)]


@pytest.mark.parametrize(("grace", "step"), [("0", 6), ("60", 7)])
def test_a_save_made_at_sigterm_is_resumed(new_job, program: str, grace: str, step: int) -> None:
    """Though the flush of what was the newest when the other died has begun by then."""
    job = new_job().run(program=program, restarts=1, FASTCKPT_STOP_GRACE=grace)
    assert loads(job.folder) == [["-1  ", f"{step} memory {step}"]] * 2, job.text()
    assert job.stored()[0] == step


def test_workers_stopped_for_another_node_get_sigterm_first(nodes: Nodes, program: str) -> None:
    nodes.run(program=program, FASTCKPT_STOP_GRACE="60", FASTCKPT_PRELOAD="auto")
    assert loads(nodes.job.folder) == [["-1  ", "7 memory 7"]] * 2, nodes.text()
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


@pytest.mark.parametrize("phase", ["snapshot.skeleton", pytest.param("snapshot.commit", marks=campaign)])
def test_saves_while_one_worker_is_stopped_are_skipped_and_name_it(new_job, uninterrupted, phase) -> None:
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


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=campaign)])
def test_an_agent_that_stands_still_and_a_stopped_worker_cost_a_job_nothing(new_job, uninterrupted, seconds) -> None:
    """And SIGKILL reaches the stopped, where another dies meanwhile."""
    job = new_job().with_faults(stop(rank=1, at="snapshot.commit", step=36))
    job.start("--wait-at", "21", "--wait").wait_for_all(21)
    job.send(signal.SIGSTOP)
    job.go_on(21)
    time.sleep(seconds)
    assert len(job.resumes()) == 1 and not job.skips(), job.text()
    job.send(signal.SIGCONT)
    job.until(lambda: job.injected() == 1 and job.is_stopped(1), "rank 1 stopped")
    assert_agent_answers(job)
    job.kill_processes(0)
    assert job.wait() == 0, job.text()
    assert job.resumes()[1:] == [(34, "memory")]
    assert_as_if_nothing_had_happened(job, uninterrupted())
    assert job.stored()[0] == 60


@campaign
def test_a_worker_that_stands_still_for_90_s_is_a_hang_and_the_job_is_sound(new_job, uninterrupted) -> None:
    """With the default settings: after a minute in which no rank does anything."""
    job = new_job().with_faults(stop(rank=1, at="train.step", step=25)).start("--wait")
    job.until(lambda: job.injected() > 0 and job.is_stopped(1), "rank 1 stopped")
    pid = job.pid(1)
    time.sleep(90)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    assert job.wait() == 0, job.text()
    assert_all_injected(job)
    assert job.resumes()[1:] == [(24, "memory")]
    assert "rank 1" in job.text() and "the job hangs" in job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted())
