"""A deliberate rollback of a real job: a new history begins at the old step, though the agent dies in it."""

import shutil
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory, Stored
from tests.faults.faults import kill_agent
from tests.faults.jobs import Job, assert_all_injected


def whole(job: Job) -> list[Stored]:
    """What is on storage, newest first; nothing else is there, and no file is a mixture."""
    scan = CheckpointDirectory(job.checkpoint_dir).scan()
    assert scan.damaged == scan.quarantined == scan.stale == []
    for stored in scan.whole:
        stored.verify()
    return scan.whole


@pytest.mark.parametrize("phase", ["rename", pytest.param("drop", marks=pytest.mark.campaign)])
def test_a_crash_while_a_step_is_republished_leaves_the_old_or_the_new_one(new_job, uninterrupted, phase: str):
    """At its rename, the step of the old history is retired; before its removal, it is still on storage."""
    job, reference = new_job(), uninterrupted()
    shutil.copytree(reference.checkpoint_dir, job.checkpoint_dir)
    base = sorted(stored.id.step for stored in whole(reference))[1]
    job.with_faults(kill_agent(at=f"persist.{phase}", step=base + 1))
    assert job.start("--resume-path", str(job.checkpoint_dir / f"checkpoint-{base}")).wait() != 0
    job.run()
    assert_all_injected(job)
    assert [tier for _, tier in job.resumes()] == ["storage", "memory"]
    assert job.resumes()[1][0] > base
    assert job.ends() == reference.ends()
    for rank in (0, 1):
        expected = reference.losses(rank)
        assert job.losses(rank) == {step: expected[step] for step in range(base + 1, 61)}
    found = [stored.id for stored in whole(job)]
    assert found[0].step == job.newest_saved() > base and found[0].history > 1
    steps = [id.step for id in found]
    assert len(steps) == len(set(steps)), "what was saved again took the place of the old"
    left = [path.name for path in Path(job.checkpoint_dir, ".fastckpt").iterdir()]
    assert not [name for name in left if name.startswith(("tmp-", "retired-", "dropped-"))]
