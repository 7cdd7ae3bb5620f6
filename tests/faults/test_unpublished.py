"""Agents of two nodes that die between the first part of a checkpoint and its publication, with their memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.faults import kill_agent
from tests.faults.jobs import Job, assert_all_injected
from tests.faults.nodes import Nodes
from tests.support.live_folders import remove_live

OPTIONS = {"FASTCKPT_PRELOAD": "auto"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "job")
    yield made
    made.end()


def lose_memory(nodes: Nodes) -> None:
    for node in range(2):
        for arena in nodes.shm(node).iterdir():
            remove_live(arena)


def as_if_nothing_had_happened(job: Job, reference: Job) -> None:
    assert job.ends() == reference.ends(), job.text()
    assert [job.losses(rank) for rank in (0, 1)] == [reference.losses(rank) for rank in (0, 1)]


def test_an_unpublished_checkpoint_with_all_parts_is_published_by_the_next_launch(nodes, uninterrupted):
    """Whoever begins to publish dies: the next launch has step 20."""
    nodes.job.with_faults(*[kill_agent(at="persist.manifest", step=20)] * 2)
    nodes.start("--wait", **OPTIONS)
    for node in (0, 1):
        nodes.wait_for_death(node)
    storage = CheckpointDirectory(nodes.job.checkpoint_dir)
    assert nodes.job.stored() == [10] and [id.step for id in storage.scan().gathered] == [20]
    lose_memory(nodes)
    nodes.run("--wait", **OPTIONS)
    assert_all_injected(nodes.job)
    assert nodes.resumes() == [((0, ""), (0, "")), ((20, "storage"), (20, "storage"))]
    assert "is not resumed" not in nodes.text()
    as_if_nothing_had_happened(nodes.job, uninterrupted())
    assert storage.scan().gathered == []


def test_an_unpublished_checkpoint_that_lacks_a_part_does_not_count(nodes, uninterrupted):
    """One agent dies before it has written its part of step 20, the other when it has: all is told, and goes on."""
    nodes.job.with_faults(kill_agent(at="persist.part", step=20))
    nodes.start("--wait", **OPTIONS)
    parts = nodes.job.checkpoint_dir / ".fastckpt"
    while not (found := list(parts.glob("parts-*-20-*/part-*.json"))):
        assert any(agent.process.poll() is None for agent in nodes.agents), nodes.text()
    written = int(found[0].stem.removeprefix("part-"))
    nodes.wait_for_death(1 - written)
    nodes.agents[written].kill_processes("agent")
    nodes.wait_for_death(written)
    lose_memory(nodes)
    nodes.run("--wait", **OPTIONS)
    assert_all_injected(nodes.job)
    assert nodes.resumes() == [((0, ""), (0, "")), ((10, "storage"), (10, "storage"))]
    why = f"it lacks the parts of 1 of 2 nodes: {1 - written}"
    assert f"step 20 of history 1 on storage is not resumed: {why}; step 10 of history 1 is resumed" in nodes.text()
    as_if_nothing_had_happened(nodes.job, uninterrupted())
    assert CheckpointDirectory(nodes.job.checkpoint_dir).scan().gathered == []
