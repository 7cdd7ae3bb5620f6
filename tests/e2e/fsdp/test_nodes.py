"""Real jobs of several nodes, each with memory of its own: workers and agents die, memory is lost or damaged."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.e2e.fsdp.conftest import PROGRAM
from tests.faults.faults import delay, flip, kill, remove
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.nodes import Nodes
from tests.faults.table import SHARDS as SAVING
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


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_fsdp_job_on_two_nodes_resumes_after_kills_in_each_phase(nodes, uninterrupted, rank, overlap):
    phases = ("snapshot.shards", "overlap.copy", "overlap.commit", "overlap.wait") if overlap else SAVING
    kills = [kill(rank, at="snapshot.plan", step=2)]
    kills += [kill(rank, at=phase, step=6 + 8 * i) for i, phase in enumerate(phases)]
    kills += [kill(rank, at="resume.verify"), kill(rank, at="resume.load")]
    script = ("--steps", "60", *(["--overlap"] if overlap else []))
    nodes.job.with_faults(*kills)
    nodes.run(*script, **OPTIONS)
    survived(nodes, uninterrupted("--steps", "60"))
    assert {tier for start in nodes.resumes()[2:] for _, tier in start} == {"memory"}


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["fsdp2", "hsdp", "fsdp1", "2d"])
def test_an_fsdp_job_on_nodes_of_two_ranks_resumes_after_kills(tmp_path, uninterrupted, way):
    """With hsdp, each node has the whole model; with fsdp1, torch makes collectives to get the state."""
    nodes = Nodes(tmp_path / "job", ranks=2)
    try:
        nodes.job.with_faults(kill(2, at="snapshot.fill", step=16))
        nodes.run("--way", way, **OPTIONS)
        survived(nodes, uninterrupted("--way", way, ranks=4))
        assert nodes.resumes()[1] == ((14, "memory"),) * 4
    finally:
        nodes.end()


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "rank_1.pt", "node_1.metadata"])
def test_a_file_missing_in_the_memory_of_one_node_makes_all_fall_back(nodes, uninterrupted, name):
    """All go on from the step before, which both have."""
    nodes.job.with_faults(kill(rank=1, at="snapshot.fill", step=16), remove(name, 1, at="resume.verify", saved=14))
    nodes.run(**OPTIONS)
    assert nodes.resumes()[1:] == [((12, "memory"), (12, "memory"))]
    survived(nodes, uninterrupted(), interval=4)


@pytest.mark.campaign
@pytest.mark.parametrize("harm", [remove, flip])
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_lost_on_one_node_is_replaced_from_storage(nodes, uninterrupted, harm, rank):
    """Each step is on storage, and so memory has digests."""
    pause, harmed = delay(5, at="snapshot.shards", step=16), harm(f"__{rank}_0.distcp", rank, "resume.verify", saved=14)
    nodes.job.with_faults(pause, kill(rank=0, at="snapshot.fill", step=16), harmed)
    nodes.run("--disk", "2", **OPTIONS)
    tiers = ["memory", "memory"]
    tiers[rank] = "storage"
    assert nodes.resumes()[1:] == [tuple((14, tier) for tier in tiers)]
    survived(nodes, uninterrupted("--disk", "2"))


@pytest.mark.campaign
def test_a_node_whose_slots_are_all_bad_makes_all_nodes_resume_from_storage(nodes, uninterrupted):
    """Its three slots hold steps 14 and 12, and what is left of 16."""
    nodes.job.with_faults(kill(rank=1, at="snapshot.fill", step=16), remove("__1_0.distcp", 1, at="resume.verify"))
    nodes.run(**OPTIONS)
    assert nodes.resumes()[1:] == [((10, "storage"), (10, "storage"))]
    survived(nodes, uninterrupted(), interval=10)


def kill_agent(nodes: Nodes, node: int, step: int) -> None:
    nodes.job.process = nodes.agents[0].process
    nodes.job.wait_for("saved", step)
    nodes.job.wait_for("saved", step, 1)
    nodes.agents[node].kill_processes("agent")
    nodes.wait_for_death(node)


@pytest.mark.campaign
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_fsdp_job_resumes_after_the_agent_of_one_node_is_killed(nodes, uninterrupted, is_lost):
    """Started again, it finds its memory; or it does not, since that was another host, and all need storage."""
    nodes.start("--steps", "400", **OPTIONS)
    kill_agent(nodes, 1, 16)
    if is_lost:
        remove_live(nodes.shm(1))
    nodes.start("--steps", "400", nodes=[1], **OPTIONS)
    assert nodes.wait() == [0, 0], nodes.text()
    (first, second) = nodes.resumes()[1]
    assert first[0] == second[0] >= 10
    assert (first[1], second[1]) == (("storage",) * 2 if is_lost else ("memory",) * 2)
    survived(nodes, uninterrupted("--steps", "400"), interval=20 if is_lost else 2)


@pytest.mark.campaign
@pytest.mark.parametrize("lost", [(), (0,), (0, 1)])
def test_an_fsdp_job_resumes_after_all_agents_are_killed(nodes, uninterrupted, lost):
    nodes.start("--steps", "400", **OPTIONS)
    kill_agent(nodes, 0, 16)
    nodes.agents[1].kill_processes("agent")
    nodes.wait_for_death(1)
    for node in lost:
        remove_live(nodes.shm(node))
    nodes.start("--steps", "400", **OPTIONS, FAULTS_LAUNCH="2")
    assert nodes.wait() == [0, 0], nodes.text()
    assert {tier for _, tier in nodes.resumes()[1]} == {"storage" if lost else "memory"}
    survived(nodes, uninterrupted("--steps", "400"), interval=20 if lost else 2)


@pytest.mark.campaign
@pytest.mark.parametrize(("disk", "found"), [("4", (12, "mixed")), ("8", (8, "mixed")), ("7", (7, "storage"))])
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


@pytest.mark.campaign
def test_an_fsdp_job_of_two_nodes_resumes_on_one(nodes):
    """It has half of the shards in memory: both halves are on storage."""
    script = ("--full", "--memory", "2", "--disk", "10", "--steps", "2000")
    nodes.start(*script, **OPTIONS, least="1")
    kill_agent(nodes, 1, 16)
    assert nodes.agents[0].wait() == 0, nodes.text()
    remove_live(nodes.shm(1))
    for telemetry in Path("/dev/shm").glob(f"*{nodes.shm(1).parent.name}.node-1.*"):
        telemetry.unlink()
    line = [line for line in nodes.job.log(0) if "loaded" in line][1]
    assert (line["world"], line["tier"], line["equal"], line["loaded"] % 10) == (1, "storage", True, 0)
