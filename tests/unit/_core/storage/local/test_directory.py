"""Published checkpoints are found, newest first, and nothing else is."""

import errno
import json
import os
import shutil

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.policy.lineage import PASSED_OVER
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.commit import Commit
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError
from tests.support.other_users import as_nobody
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, ids, images, publish

TRACKER = "latest_checkpointed_iteration.txt"


def test_a_published_checkpoint_has_its_layout_and_manifest(directory, tmp_path):
    assert directory.checkpoints() == directory.scan().damaged == directory.sweep() == []
    directory.delete(SaveId(0, 1))
    assert not directory.path.exists()  # readers make nothing
    source = images(tmp_path / "source", SaveId(2, 7))
    source |= {"rank_1.pt": source["rank_0.pt"], "deep/er.pt": source["rank_0.pt"]}
    manifest = directory.publish(
        PublishRequest(SaveId(2, 7), source, parent=SaveId(1, 5), world_size=2, details={"omp_num_threads": 1})
    )
    place = directory.path / "checkpoint-7"
    assert {str(path.relative_to(place)) for path in place.rglob("*.*")} == {*source, "manifest.json"} - {"empty"}
    assert (directory.path / TRACKER).read_text() == "7"
    assert json.loads((place / "manifest.json").read_text())["id"] == {"history": 2, "step": 7}
    [stored] = directory.checkpoints()
    assert stored.manifest == manifest and stored.path == stored.place == place and stored.id == (2, 7)
    assert (manifest.parent, manifest.world_size, manifest.details) == ((1, 5), 2, {"omp_num_threads": 1})
    assert stored.path_of("deep/er.pt").read_bytes() == source["rank_0.pt"].read_bytes()
    with pytest.raises(BadCheckpoint, match="no file 'other'"):
        stored.path_of("other")
    assert_sound(directory)
    assert_clean(directory)


def test_checkpoints_are_listed_newest_first_by_history_then_step_whatever_the_tracker_says(directory):
    for id in [SaveId(0, 50), SaveId(0, 60), SaveId(0, 100), SaveId(1, 60), SaveId(0, 70)]:
        publish(directory, id)
    assert assert_sound(directory) == [(1, 60), (0, 100), (0, 70), (0, 50)]
    assert_clean(directory)
    assert (directory.path / TRACKER).read_text() == "70"  # a hint, of the last one
    for text in ("9", "garbage", ""):
        (directory.path / TRACKER).write_text(text)
        assert ids(directory)[0] == (1, 60)
    (directory.path / TRACKER).unlink()
    assert ids(directory)[0] == (1, 60)


def test_directories_of_others_are_left_alone(directory):
    publish(directory, SaveId(0, 5))
    others = ["checkpoint-6", "checkpoint-best", "checkpoint-7.bak", "7", "notes"]
    for name in others:
        (directory.path / name).mkdir()
        (directory.path / name / "pytorch_model.bin").write_text("theirs")
    (directory.path / "checkpoint-8").write_text("a file")
    (directory.path / "notes/manifest.json").write_text(json.dumps({"files": []}))
    os.mkfifo(directory.path / "pipe")
    assert ids(directory) == [(0, 5)] and directory.scan().damaged == []
    directory.sweep()
    publish(directory, SaveId(0, 6))
    assert assert_sound(directory) == [(0, 6), (0, 5)]
    kept = [path.parent.name for path in directory.path.rglob("pytorch_model.bin")]
    assert len(kept) == len(others)
    assert [name for name in kept if name.startswith("checkpoint-6.aside-")] and "checkpoint-6" not in kept
    publish(directory, SaveId(0, 7), f"{directory.path}/best/")
    manifest = directory.path / "best/manifest.json"
    manifest.write_text(manifest.read_text().replace("model.pt", "mudel.pt"))
    assert [path.name for path, _ in directory.scan().damaged] == ["best"]


def test_delete_removes_a_checkpoint_and_refuses_the_newest_whole_one(directory):
    for step in (1, 2, 3):
        publish(directory, SaveId(0, step))
    for id in (SaveId(0, 2), SaveId(0, 2), SaveId(7, 7)):  # what is not there is not deleted
        directory.delete(id)
    assert assert_sound(directory) == [(0, 3), (0, 1)]
    assert not (directory.path / "checkpoint-2").exists()
    assert_clean(directory)
    with pytest.raises(ConfigError, match="newest of 2 whole"):
        directory.delete(SaveId(0, 3))
    assert assert_sound(directory) == [(0, 3), (0, 1)]
    (directory.path / "checkpoint-3/model.pt").unlink()
    with pytest.raises(ConfigError, match="step 1 of history 0"):
        directory.delete(SaveId(0, 1))


def test_what_another_user_alone_may_read_is_passed_over_unless_it_may_be_the_newest(directory):
    """Such as lost+found, where the checkpoint directory is a whole file system."""
    publish(directory, SaveId(0, 5))
    directory.path.parent.chmod(0o755)
    for name in ("lost+found", "checkpoint-1", "checkpoint-9"):
        (directory.path / name).mkdir(mode=0o700)
        with as_nobody():
            if name == "checkpoint-9":
                with pytest.raises(PersistError, match=r"checkpoint-9/manifest\.json cannot be read now: Permission"):
                    directory.scan()
            else:
                assert ids(directory) == [stored.id for stored in directory.known()] == [(0, 5)]


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_resume_passed_over_makes_way_for_its_step_and_is_kept(directory, monkeypatch, is_killed):
    publish(directory, SaveId(1, 5))
    publish(directory, SaveId(1, 6))
    if is_killed:  # before what made way is dropped: the sweep has to know
        monkeypatch.setattr(Commit, "finish", lambda *_: None)
    publish(directory, SaveId(2, 6), parent=SaveId(1, 5), **{PASSED_OVER: [[1, 6]]})
    directory.sweep()
    assert assert_sound(directory) == [(2, 6), (1, 5)]
    [aside] = directory.path.glob("checkpoint-6.aside-*")
    assert (aside / "model.pt").read_bytes().startswith(b"1.6 model")
    assert_clean(directory)


def test_the_link_to_a_checkpoint_that_was_moved_away_is_replaced_or_deleted_and_what_it_leads_to_stays(
    directory, tmp_path, monkeypatch
):
    for id in (SaveId(0, 4), SaveId(0, 5), SaveId(0, 6)):
        publish(directory, id)
    shutil.move(directory.path / "checkpoint-5", tmp_path / "elsewhere")
    (directory.path / "checkpoint-5").symlink_to(tmp_path / "elsewhere")
    shutil.move(directory.path / "checkpoint-4", directory.path / "archive")
    (directory.path / "checkpoint-4").symlink_to("archive")  # which leads nowhere from another directory
    move = DirectoryRoot.move

    def full(self, source, target):
        if target.name == "checkpoint-5" and source.name.startswith("tmp-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        move(self, source, target)

    with monkeypatch.context() as patch, pytest.raises(PersistError, match="No space"):
        patch.setattr(DirectoryRoot, "move", full)
        publish(directory, SaveId(1, 5))
    assert ids(directory) == [(0, 6), (0, 5), (0, 4)] and (directory.path / "checkpoint-5").is_symlink()
    publish(directory, SaveId(1, 5))
    directory.delete(SaveId(0, 4))
    assert ids(directory) == [(1, 5), (0, 6)] and not (directory.path / "checkpoint-4").is_symlink()
    assert (tmp_path / "elsewhere/model.pt").exists() and (directory.path / "archive/manifest.json").exists()
