"""Real jobs whose checkpoints a framework lays out: workers, agents and memory are lost, on one node and on two."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.e2e.native.conftest import PROGRAM
from tests.faults.faults import delay, flip, kill, kill_agent, remove
from tests.faults.jobs import assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.nodes import Nodes

OPTIONS = {"program": PROGRAM, "FASTCKPT_PRELOAD": "auto"}
SAVING = ("snapshot.skeleton", "snapshot.fill", "snapshot.commit", "snapshot.notify")
SHARED = {"model.safetensors", "state.json", "optimizer/first.pt"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "job")
    yield made
    made.end()


def names(stored) -> set[str]:
    return {entry.name for entry in stored.manifest.files}


def test_a_job_of_framework_files_resumes_after_workers_and_agents_are_killed(new_job, uninterrupted):
    job = new_job().with_faults(
        kill(0, at="snapshot.fill", step=6),
        kill(1, at="snapshot.commit", step=14),
        kill_agent(at="snapshot.notify", step=20),
    )
    job.run_to_the_end("--tags", "--wait", **OPTIONS)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted("--tags", program=PROGRAM))
    # the agent may die before all ranks have committed
    assert [step for step, _ in job.resumes()] in ([0, 4, 12, 18], [0, 4, 12, 20])
    assert {tier for _, tier in job.resumes()} == {"", "memory"}
    found = CheckpointDirectory(job.checkpoint_dir).checkpoints()
    assert [stored.path.name for stored in found] == [f"global_step{step}" for step in job.stored()]
    assert (job.checkpoint_dir / "latest").read_text() == found[0].path.name
    assert names(found[0]) == SHARED | {"random/0.pt", "random/1.pt"}


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_of_framework_files_resumes_after_kills_in_each_phase(new_job, uninterrupted, rank):
    kills = [kill(rank, at=phase, step=6 + 8 * i) for i, phase in enumerate(SAVING)]
    kills += [kill(rank, at="resume.verify"), kill(rank, at="resume.load")]
    job = new_job().with_faults(*kills).run("--steps", "60", **OPTIONS)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted("--steps", "60", program=PROGRAM))


@pytest.mark.campaign
@pytest.mark.parametrize("harm", [remove, flip])
@pytest.mark.parametrize("name", ["model.safetensors", "random/1.pt", "optimizer/first.pt"])
def test_damaged_memory_of_framework_files_falls_back_to_storage(new_job, uninterrupted, harm, name):
    """Each step is on storage, and memory has digests: it is found before a rank reads it, or by the one that does."""
    job = new_job().with_faults(
        delay(0, at="snapshot.skeleton", step=16),  # the faults that follow are not injected before
        harm(name, 0, at="snapshot.fill", saved=14),
        kill(0, at="snapshot.commit", step=16),
    )
    job.run("--disk", "2", "--wait", **OPTIONS)
    assert_all_injected(job)
    assert job.ends() == uninterrupted("--disk", "2", "--wait", program=PROGRAM).ends(), job.text()
    assert job.resumes()[1] == (14, "storage"), job.text()


@pytest.mark.campaign
def test_a_job_of_framework_files_on_two_nodes_resumes_after_a_worker_dies(nodes, uninterrupted):
    """Each node has what is common; nothing of step 14 is on storage."""
    nodes.job.with_faults(kill(1, at="snapshot.fill", step=16))
    nodes.run("--tags", "--wait", **OPTIONS)
    assert_as_if_nothing_had_happened(nodes.job, uninterrupted("--tags", program=PROGRAM))
    assert nodes.resumes() == [((0, ""), (0, "")), ((14, "memory"), (14, "memory"))]
    for stored in CheckpointDirectory(nodes.job.checkpoint_dir).checkpoints():
        assert names(stored) == SHARED | {"random/0.pt", "random/1.pt"}
        assert stored.path.name == f"global_step{stored.id.step}"


def test_framework_files_of_another_node_come_from_what_is_kept_of_them(nodes, uninterrupted):
    """The optimizer is a file of the first node, of which the second keeps a copy."""
    nodes.job.with_faults(kill(1, at="snapshot.fill", step=16))
    nodes.run("--split", "--wait", **OPTIONS)
    assert_as_if_nothing_had_happened(nodes.job, uninterrupted("--split", program=PROGRAM))
    assert nodes.resumes()[1] == ((14, "memory"), (14, "memory")), nodes.text()
