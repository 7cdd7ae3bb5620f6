"""Jobs of two nodes: workers, agents and hosts die, between a part of a checkpoint and its publication too."""

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.faults import kill, kill_agent
from tests.faults.jobs import assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.own_disk import needs_mounts
from tests.support.live_folders import remove_live


def test_a_job_on_two_nodes_resumes_from_memory_after_a_worker_dies(nodes, uninterrupted) -> None:
    nodes.job.with_faults(kill(rank=1, at="snapshot.fill", step=16))
    nodes.run("--wait")
    assert nodes.resumes() == [((0, ""), (0, "")), ((14, "memory"), (14, "memory"))]
    assert_as_if_nothing_had_happened(nodes.job, uninterrupted())
    assert CheckpointDirectory(nodes.job.checkpoint_dir).scan().gathered == []


def test_an_unpublished_checkpoint_that_lacks_a_part_does_not_count(nodes, uninterrupted) -> None:
    """One agent dies before it has written its part of step 20, the other when it has: all is told, and goes on."""
    nodes.job.with_faults(kill_agent(at="persist.part", step=20))
    nodes.start("--wait")
    parts = nodes.job.checkpoint_dir / ".fastckpt"
    while not (found := list(parts.glob("parts-*-20-*/part-*.json"))):
        assert any(agent.process.poll() is None for agent in nodes.agents), nodes.text()
    written = int(found[0].stem.removeprefix("part-"))
    nodes.wait_for_death(1 - written)
    nodes.agents[written].kill_processes("agent")
    nodes.wait_for_death(written)
    for node in range(2):
        for arena in nodes.shm(node).iterdir():
            remove_live(arena)
    nodes.run("--wait")
    assert_all_injected(nodes.job)
    assert nodes.resumes() == [((0, ""), (0, "")), ((10, "storage"), (10, "storage"))]
    why = f"it lacks the parts of 1 of 2 nodes: {1 - written}"
    assert f"step 20 of history 1 on storage is not resumed: {why}; step 10 of history 1 is resumed" in nodes.text()
    assert nodes.job.ends() == uninterrupted().ends(), nodes.text()
    assert [nodes.job.losses(rank) for rank in (0, 1)] == [uninterrupted().losses(rank) for rank in (0, 1)]
    assert CheckpointDirectory(nodes.job.checkpoint_dir).scan().gathered == []


def test_nodes_with_separate_disks_under_one_name_are_refused_by_all_ranks(nodes) -> None:
    """Node 0 has what the test sees, node 1 another: they refuse, and say which nodes these are."""
    needs_mounts()
    nodes.disks[1] = nodes.job.folder / "disk-1"
    nodes.start(FASTCKPT_MAX_STALLS="1")
    assert 0 not in nodes.wait()
    text = nodes.text()
    assert f"ConfigError: {nodes.job.checkpoint_dir} is not the same directory on all nodes: nodes 0 (" in text
    assert ") have one; nodes 1 (" in text
    assert all(nodes.job.losses(rank) == {} for rank in (0, 1)), text
    marks = [(path / ".fastckpt/identity").read_text() for path in (nodes.job.checkpoint_dir, nodes.disks[1])]
    assert len(set(marks)) == 2


@pytest.mark.campaign
def test_nodes_persist_the_same_steps_on_a_disk_much_slower_than_their_saves(nodes) -> None:
    """Without a storage type. A checkpoint of 86 KB takes several steps, and a persist is under way in nearly all."""
    script = ("--default", "--memory", "1", "--steps", "80")
    nodes.run(*script, FASTCKPT_SUMMARY="full", FASTCKPT_PERSIST_MBPS="4")
    steps = nodes.job.stored()
    assert steps[0] == 80 and len(steps) > 2, steps
    assert len(nodes.job.skips()) < 5, "the word that all nodes hold one may be two steps late at times"
    assert "overtaken" in nodes.text()
