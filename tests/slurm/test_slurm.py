"""Jobs of examples/slurm under a Slurm of their own: stopped in each way in which Slurm stops jobs, and resumed."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.hosts import ROOT
from tests.nodes.recovery import Losses
from tests.nodes.reference import losses_in
from tests.slurm.workload_manager import Slurm
from tests.support.json_lines import whole_lines

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
ONE, MANY = (ROOT / "examples/slurm" / name for name in ("one_node.sbatch", "many_nodes.sbatch"))
TRAIN = Path(__file__).with_name("train.py")
STEPS = 900
WAY = ("--steps", str(STEPS), "--memory", "1", "--disk", "1000", "--pace", "0.03")
Uninterrupted = Callable[..., Losses]


class Job:
    """A job, or a task of an array, by its name."""

    def __init__(self, slurm: Slurm, name: str) -> None:
        self.slurm, self.name = slurm, name

    @property
    def logs(self) -> Path:
        return self.slurm.work / "checkpoints" / f"{self.name}.logs"

    @property
    def text(self) -> str:
        return "".join(path.read_text() for path in self.slurm.work.glob("*.out"))

    def lines(self, what: str) -> list[dict[str, Any]]:
        return [line for log in self.logs.glob("log.*") for line in whole_lines(log) if line["what"] == what]

    def until_step(self, step: int) -> None:
        self.slurm.until(
            lambda: any(line["step"] >= step for line in self.lines("step")), f"step {step} of {self.name}"
        )

    def until_requeued(self) -> None:
        def is_requeued() -> bool:
            job = self.slurm.job(self.name)
            return job["JobState"] == "PENDING" and job["Restarts"] != "0"

        self.slurm.until(is_requeued, f"the requeue of {self.name}")

    def resume_at_once(self) -> None:
        """Have Slurm forget that a job which it requeues waits for two minutes."""
        self.until_requeued()
        time.sleep(3)  # a start in the second of the end is refused: "Job credential revoked"
        self.slurm("scontrol", "update", f"JobId={self.name}", "StartTime=now", check=False)

    def ends(self, state: str = "COMPLETED") -> None:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL")
        self.slurm.until(lambda: self.slurm.state(self.name) in over, f"the end of job {self.name}", 400)
        assert self.slurm.state(self.name) == state, self.text

    def resumed(self) -> dict[int, set[str]]:
        """Of each step from which it has resumed, from where its workers had it."""
        tiers: dict[int, set[str]] = {}
        for line in self.lines("loaded"):
            if line["step"]:
                tiers.setdefault(line["step"], set()).add(line["tier"])
        return tiers


def submit(slurm: Slurm, script: Path, *options: str) -> Job:
    workers = "2" if script is ONE else "1"
    return Job(slurm, slurm.submit(*options, str(script), str(TRAIN), *WAY, SLURM_GPUS_ON_NODE=workers))


@pytest.mark.parametrize("script", [ONE, MANY], ids=lambda path: path.stem)
def test_a_job_at_its_time_limit_is_flushed_requeued_and_resumed(
    slurm: Slurm, uninterrupted: Uninterrupted, script: Path
) -> None:
    job = submit(slurm, script)
    job.until_step(100)
    slurm("scontrol", "update", f"JobId={job.name}", "TimeLimit=3")  # Slurm sends the signal 120 s before its end
    job.until_requeued()
    for number in (1, 2):  # as if it came to other hosts
        slurm.cluster.hosts[number].run("bash", "-c", "rm -rf /dev/shm/*")
    job.resume_at_once()
    assert "exit code 75" in job.text
    slurm("scontrol", "update", f"JobId={job.name}", "TimeLimit=30")
    job.ends()
    [(step, tiers)] = job.resumed().items()
    assert step > 100 and tiers == {"storage"}
    assert slurm.job(job.name)["Restarts"] == "1"
    assert losses_in(job.logs) == uninterrupted("--steps", str(STEPS), ranks=2)


def test_a_job_of_a_lost_node_is_requeued_and_resumes(slurm: Slurm, uninterrupted: Uninterrupted) -> None:
    job = submit(slurm, MANY)
    job.until_step(100)
    slurm.cluster.lose(2)
    job.resume_at_once()
    assert slurm.cluster.add(2).reaches(1)  # which learns its new address on the network; else its step is not started
    slurm.start_node(2)
    job.ends()
    assert len(job.resumed()) == 1
    assert losses_in(job.logs) == uninterrupted("--steps", str(STEPS), ranks=2)


def test_a_job_whose_slurmd_is_killed_is_requeued_and_resumes(slurm: Slurm, uninterrupted: Uninterrupted) -> None:
    """Its agent lives on, with one of the first start, until the slurmd that comes back ends it."""
    job = submit(slurm, MANY)
    job.until_step(100)
    slurm.kill_node(2)
    job.until_requeued()
    agent = slurm.agents(2)[0]
    slurm.start_node(2)
    slurm.until(lambda: agent not in slurm.agents(2), "the end of the agent whose job was requeued")
    job.ends()  # after the two minutes of Slurm: started sooner, it may be told of one node less
    assert len(job.resumed()) == 1 and min(job.resumed()) > 100
    assert slurm.job(job.name)["Restarts"] == "1"
    assert losses_in(job.logs) == uninterrupted("--steps", str(STEPS), ranks=2)


def test_tasks_of_an_array_on_one_node_do_not_meet(slurm: Slurm, uninterrupted: Uninterrupted) -> None:
    array = submit(slurm, ONE, "--array=1-2", "--nodelist=node1", "--cpus-per-task=1")
    jobs = [Job(slurm, f"{array.name}_{task}") for task in (1, 2)]
    for job in jobs:
        job.until_step(100)
    slurm("scancel", "--signal=TERM", jobs[0].name)
    jobs[0].resume_at_once()
    for job in jobs:
        job.ends()
        assert losses_in(job.logs) == uninterrupted("--steps", str(STEPS), ranks=2)
    assert len(jobs[0].resumed()) == 1 and not jobs[1].resumed()


def test_a_job_that_is_cancelled_is_flushed_and_does_not_come_again(slurm: Slurm) -> None:
    job = submit(slurm, ONE)
    job.until_step(100)
    slurm("scancel", job.name)
    job.ends("CANCELLED")
    events = slurm.work / "checkpoints" / job.name / ".fastckpt/events"
    text = "".join(path.read_text() for path in events.glob("*.jsonl"))
    done = [json.loads(line) for line in text.splitlines() if '"flush_done"' in line]
    assert done and done[-1]["step"] >= 100


@pytest.mark.parametrize("script", [ONE, MANY], ids=lambda path: path.stem)
def test_a_job_with_a_bad_node_avoids_it_and_one_that_storage_failed_is_held_with_its_nodes(
    slurm: Slurm, script: Path
) -> None:
    """Whatever has ended with these codes: the script comes to say so before the requeue ends it."""
    command = slurm.work / "bin/fastckpt-run"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" = node1 ] && exit "$TEST_CODE"\nexit "$TEST_OTHER"\n')
    command.chmod(0o755)
    cases = [("76", "75", "ExcNodeList"), ("74", "75", "ReqNodeList")]
    if script is MANY:
        cases.append(("74", "137", "ReqNodeList"))  # an agent was killed
    for code, other, field in cases:
        path = f"{command.parent}:{os.environ['PATH']}"
        node = ("--nodelist=node1",) if script is ONE else ()
        job = Job(slurm, slurm.submit(*node, str(script), "train.py", PATH=path, TEST_CODE=code, TEST_OTHER=other))
        nodes = "node1" if script is ONE or code == "76" else "node[1-2]"
        job.until_requeued()
        slurm.until(lambda job=job, field=field, nodes=nodes: slurm.job(job.name)[field] == nodes, f"{field}={nodes}")
        assert (slurm.job(job.name)["Priority"] == "0") == (code == "74" and other == "75"), "held"
        slurm("scancel", job.name)
