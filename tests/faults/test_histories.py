"""Deliberate rollbacks of a real job: a new history begins at the old step, whatever process dies in it."""

import shutil
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory, Stored
from tests.faults.faults import kill, kill_agent
from tests.faults.jobs import Job, assert_all_injected


class Rollback:
    """A job whose directory holds the checkpoints of an earlier one, and that goes back to the second of them."""

    def __init__(self, job: Job, reference: Job) -> None:
        self.job, self.reference = job, reference
        shutil.copytree(reference.checkpoint_dir, job.checkpoint_dir)
        self.step = sorted(stored.id.step for stored in whole(reference))[1]
        self.path = str(job.checkpoint_dir / f"checkpoint-{self.step}")

    def run(self, *faults, again: bool) -> None:
        """Launch it until it ends well; after the agent's death with the path again, or without."""
        self.job.with_faults(*faults)
        self.job.start("--resume-path", self.path)
        while self.job.wait() != 0:
            assert self.job.launches <= len(faults), self.job.text()
            self.job.start(*(("--resume-path", self.path) if again else ()))

    def assert_right(self) -> None:
        """Each step was what the earlier job had made of it, and the newest history is on storage."""
        assert_all_injected(self.job)
        assert self.job.ends() == self.reference.ends()
        for rank in (0, 1):
            losses, expected = self.job.losses(rank), self.reference.losses(rank)
            assert losses.keys() == set(range(self.step + 1, 61))
            assert all(losses[step] == expected[step] for step in losses)
        found = whole(self.job)
        assert found[0].id.step == self.job.newest_saved() > self.step and found[0].id.history > 1
        steps = [stored.id.step for stored in found]
        assert len(steps) == len(set(steps))  # what was saved again took the place of the old


def whole(job: Job) -> list[Stored]:
    """What is on storage, newest first; nothing else is there, and no file is a mixture."""
    scan = CheckpointDirectory(job.checkpoint_dir).scan()
    assert scan.damaged == scan.quarantined == scan.stale == []
    for stored in scan.whole:
        stored.verify()
    return scan.whole


@pytest.fixture
def rollback(new_job, uninterrupted) -> Rollback:
    return Rollback(new_job(), uninterrupted())


def test_workers_restarted_after_a_rollback_resume_the_new_history(rollback: Rollback):
    job, base = rollback.job, rollback.step
    early, later = (kill(rank=1, at="train.step", step=base + 1), kill(rank=0, at="train.step", step=base + 13))
    rollback.run(early, later, again=True)
    starts = job.resumes()
    assert starts[:2] == [(base, "storage")] * 2  # nothing was saved before the first death
    assert len(starts) == 3 and starts[2][1] == "memory"
    assert base < job.newest_saved(1) <= starts[2][0] <= base + 12
    rollback.assert_right()


def test_a_new_launch_with_the_rollback_path_goes_back_to_it(rollback: Rollback):
    base = rollback.step
    rollback.run(kill_agent(at="train.step", step=base + 13), again=True)
    assert rollback.job.resumes() == [(base, "storage")] * 2
    rollback.assert_right()


@pytest.mark.parametrize("phase", ["rename", pytest.param("drop", marks=pytest.mark.campaign)])
def test_a_crash_while_a_step_is_republished_leaves_the_old_or_the_new_one(rollback: Rollback, phase: str):
    """At its rename, the step of the old history is retired; before its removal, it is still on storage."""
    base, job = rollback.step, rollback.job
    rollback.run(kill_agent(at=f"persist.{phase}", step=base + 1), again=False)
    assert [tier for _, tier in job.resumes()] == ["storage", "memory"]
    assert job.resumes()[1][0] > base
    rollback.assert_right()
    left = [path.name for path in Path(job.checkpoint_dir, ".fastckpt").iterdir()]
    assert not [name for name in left if name.startswith(("tmp-", "retired-", "dropped-"))]
