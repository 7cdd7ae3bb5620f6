"""Checkpoints damaged in each way that a disk or a person can, for all ranks or for one: all fall back together."""

import os
import shutil
from pathlib import Path

import pytest

from fastckpt._core.resume.storage_tier import StorageTier
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import StorageType
from fastckpt.errors import BadCheckpoint
from tests.e2e.ddp.conftest import Ranks, directory, flip, ranks, said, state  # noqa: F401 (fixtures)

DAMAGE = {
    ("flipped at its beginning", "model.pt"): lambda path: flip(path, 0),
    ("flipped at its end", "rank_0.pt"): lambda path: flip(path, -1),
    ("truncated", "manifest.json"): lambda path: os.truncate(path, path.stat().st_size // 2),
    ("longer", "model.pt"): lambda path: os.truncate(path, path.stat().st_size + 1),
    ("missing", "rank_1.pt"): Path.unlink,
    ("missing", "manifest.json"): Path.unlink,
}


@pytest.fixture
def newest(ranks: Ranks) -> Path:  # noqa: F811
    """The newest of two checkpoints that a job has left."""
    ranks.start(2)
    for step in (1, 2):
        for rank, member in enumerate(ranks.members):
            member.save_checkpoint(step, state(step), storage_type=StorageType.DISK, rank_state={"of": [step, rank]})
        ranks.members[0].wait_latest_checkpoint(60)
    ranks.end()
    return ranks.directory / "checkpoint-2"


def resumed(ranks: Ranks) -> int:  # noqa: F811
    """The step that the next launch resumes, of which each rank has its own."""
    ranks.start(2)
    [step] = {step for step, tier in ranks.resume() if tier == "storage"}
    assert [member.rank_state["of"] for member in ranks.members] == [[step, 0], [step, 1]]
    ranks.end()
    return step


def test_a_damaged_file_makes_all_ranks_fall_back_to_the_step_before(ranks: Ranks, newest: Path, said):  # noqa: F811
    for (damage, name), make in DAMAGE.items():
        shutil.copytree(ranks.directory, whole := ranks.directory.with_name("whole"))
        before = {path.name: path.stat().st_ino for path in newest.iterdir()}
        make(newest / name)
        said.clear()
        assert resumed(ranks) == 1, damage
        assert str(newest) in said.text
        if (damage, name) == ("missing", "manifest.json"):  # then it may be somebody else's: it is not moved
            assert newest.exists() and "has no manifest" in said.text
        else:
            [(aside, why)] = CheckpointDirectory(ranks.directory).scan().quarantined
            assert not newest.exists() and name in why
            left = {path.name: path.stat().st_ino for path in aside.iterdir() if path.name != "why.txt"}
            assert {each: inode for each, inode in before.items() if each != name}.items() <= left.items()
            assert resumed(ranks) == 1  # the next launch, too
        shutil.rmtree(ranks.directory)
        whole.rename(ranks.directory)


def test_damage_that_one_rank_alone_sees_is_applied_by_none_and_not_quarantined(ranks, newest, said, monkeypatch):  # noqa: F811
    """Its mount shows it another file: nobody applies the checkpoint, and nobody moves it."""
    real = StorageTier.check

    def check(self, candidate, name):
        if self._client.place.rank == 1 and name == "rank_1.pt" and candidate.record.id.step == 2:
            raise BadCheckpoint(f"{name} is damaged")
        real(self, candidate, name)

    with monkeypatch.context() as patched:
        patched.setattr(StorageTier, "check", check)
        assert resumed(ranks) == 1
    assert "is not quarantined: rank 0 finds nothing wrong with it" in said.text
    assert CheckpointDirectory(ranks.directory).scan().quarantined == []
    assert resumed(ranks) == 2  # when that is mended
