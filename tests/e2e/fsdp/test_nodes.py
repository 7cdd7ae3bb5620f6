"""Real jobs of several nodes, each with memory of its own: workers and agents die, memory is lost or damaged."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.e2e.fsdp.conftest import PROGRAM
from tests.faults.faults import kill
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.nodes import Nodes
from tests.support.live_folders import remove_live

OPTIONS = {"program": PROGRAM, "FASTCKPT_PRELOAD": "auto"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "job")
    yield made
    made.end()


def survived(nodes: Nodes, reference: Job, interval: int = 2) -> None:
    """Bit for bit; what is on storage is whole, and without the copies that nodes keep in memory.

    An ``interval`` of steps that are repeated, beyond that of the saves, says that newer ones were lost.
    """
    assert_all_injected(nodes.job)
    if interval == 2:
        assert_as_if_nothing_had_happened(nodes.job, reference)
    assert nodes.job.ends() == reference.ends(), nodes.text()
    assert [nodes.job.losses(rank) for rank in reference.ranks()] == [reference.losses(r) for r in reference.ranks()]
    assert all(steps <= interval for steps, _ in nodes.job.repeated()), nodes.job.repeated()
    storage = CheckpointDirectory(nodes.job.checkpoint_dir)
    assert storage.scan().gathered == [] and storage.scan().damaged == []
    assert nodes.job.stored()
    for stored in storage.checkpoints():
        names = {path.name for path in stored.place.iterdir()}
        ranks = range(stored.manifest.world_size)
        shards = {f"__{rank}_0.distcp" for rank in ranks} | {f"rank_{rank}.pt" for rank in ranks}
        assert names == shards | {".metadata", "manifest.json"}


def test_an_fsdp_job_on_two_nodes_resumes_after_a_worker_dies(nodes, uninterrupted):
    """Step 16 is torn on its node, and whole on the other; nothing of step 14 is on storage."""
    nodes.job.with_faults(kill(rank=1, at="snapshot.fill", step=16))
    nodes.run("--wait", **OPTIONS)
    assert nodes.resumes() == [((0, ""), (0, "")), ((14, "memory"), (14, "memory"))]
    survived(nodes, uninterrupted())


def kill_agent(nodes: Nodes, node: int, step: int) -> None:
    nodes.job.process = nodes.agents[0].process
    nodes.job.wait_for("saved", step)
    nodes.job.wait_for("saved", step, 1)
    nodes.agents[node].kill_processes("agent")
    nodes.wait_for_death(node)


@pytest.mark.campaign
def test_an_fsdp_job_resumes_after_all_agents_are_killed(nodes, uninterrupted):
    """One node's memory is lost, so that all need storage."""
    nodes.start("--steps", "400", **OPTIONS)
    kill_agent(nodes, 0, 16)
    nodes.agents[1].kill_processes("agent")
    nodes.wait_for_death(1)
    remove_live(nodes.shm(0))
    nodes.start("--steps", "400", **OPTIONS, FAULTS_LAUNCH="2")
    assert nodes.wait() == [0, 0], nodes.text()
    assert {tier for _, tier in nodes.resumes()[1]} == {"storage"}
    survived(nodes, uninterrupted("--steps", "400"), interval=20)


@pytest.mark.campaign
@pytest.mark.parametrize(("disk", "found"), [("4", (12, "mixed")), ("7", (7, "storage"))])
def test_a_load_in_another_sharding_that_needs_memory_of_other_nodes_uses_storage(nodes, disk, found):
    """The world is the same: memory, which has steps 8 to 12, seems to do until the plan of the load is known."""
    script = ("--full", "--memory", "2", "--disk", disk)
    nodes.start("--steps", "12", "--die", "--way", "fsdp2", *script, **OPTIONS)
    nodes.wait_for_death(0)
    os.kill(nodes.agents[1].process.pid, signal.SIGKILL)
    nodes.wait_for_death(1)
    nodes.run("--steps", "14", "--way", "tp", *script, **OPTIONS, FAULTS_LAUNCH="2")
    lines = [line for rank in (0, 1) for line in nodes.job.log(rank) if line.get("start") == [2, 0]]
    assert [line["equal"] for line in lines] == [True, True]
    assert {(line["loaded"], line["tier"]) for line in lines} == {found}
