"""Files that users named, inside the directory and outside, once or again and again."""

import os
import shutil

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local import claims
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import ConfigError, PersistError
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, ids, images, publish


@pytest.fixture
def directory(fast_path):
    return CheckpointDirectory(fast_path / "dir")


@pytest.fixture(params=["inside", "outside"])
def target(request, directory, fast_path):
    return (directory.path if request.param == "inside" else fast_path / "user/folder") / "ckpt.pt"


def test_the_file_lies_where_the_user_said(directory, target):
    publish(directory, SaveId(0, 7), str(target))
    [stored] = directory.checkpoints()
    assert stored.path == stored.path_of("model.pt") == target
    assert stored.path_of("rank_0.pt") == directory.path / ".fastckpt/checkpoint-0-7/rank_0.pt"
    assert stored.manifest.target == ("ckpt.pt" if target.parent == directory.path else str(target))
    assert assert_sound(directory) == [(0, 7)]
    assert_clean(directory)


def test_one_path_for_all_steps(directory, target):
    for id in [SaveId(0, 5), SaveId(0, 6), SaveId(1, 6)]:
        publish(directory, id, str(target))
        assert assert_sound(directory) == [id]
    assert_clean(directory)


def test_a_path_for_each_step_and_deletion(directory, target):
    for step in (1, 2, 3):
        publish(directory, SaveId(0, step), str(target.with_name(f"ckpt-{step}.pt")))
    assert assert_sound(directory) == [(0, 3), (0, 2), (0, 1)]
    directory.delete(SaveId(0, 1))
    assert assert_sound(directory) == [(0, 3), (0, 2)]
    assert not target.with_name("ckpt-1.pt").exists()
    with pytest.raises(ConfigError, match="newest"):
        directory.delete(SaveId(0, 3))
    assert_clean(directory)


def revive(directory, id, record):
    """Bring back the record of a checkpoint whose path was taken over, as if a crash had kept it."""
    shutil.copytree(record, directory.path / f".fastckpt/checkpoint-{id.history}-{id.step}")


@pytest.mark.parametrize("same_bytes", [False, True])
def test_a_path_that_was_taken_over_is_never_deleted_with_the_older_checkpoint(
    directory, target, fast_path, same_bytes
):
    publish(directory, SaveId(0, 1))
    old, new = SaveId(0, 5), SaveId(0, 6)
    publish(directory, old, str(target))
    shutil.copytree(directory.path / ".fastckpt/checkpoint-0-5", fast_path / "record")
    source = images(fast_path / "source", old if same_bytes else new)
    directory.publish(new, source, target=str(target))
    publish(directory, SaveId(0, 9))
    revive(directory, old, fast_path / "record")
    assert ids(directory) == [(0, 9), (0, 6), (0, 1)] and directory.damaged() == []
    directory.delete(old)
    directory.sweep()
    assert ids(directory) == [(0, 9), (0, 6), (0, 1)]
    directory.verify(directory.checkpoints()[1])


def test_an_interrupted_deletion_spares_a_path_that_was_taken_over(directory, target, fast_path):
    publish(directory, SaveId(0, 5), str(target))
    shutil.copytree(directory.path / ".fastckpt/checkpoint-0-5", directory.path / ".fastckpt/deleted-1234")
    publish(directory, SaveId(0, 6), str(target))
    directory.sweep()
    assert assert_sound(directory) == [(0, 6)]
    assert_clean(directory)


def test_a_file_that_the_user_overwrote_is_damage_and_stays(directory, target):
    publish(directory, SaveId(0, 5))
    publish(directory, SaveId(0, 6), str(target))
    size = target.stat().st_size
    for content in (b"x" * size, b"another size"):
        target.write_bytes(content)
        assert ids(directory) == [(0, 5)]
        [(path, why)] = directory.damaged()
        assert path == target and "step 6 of history 0" in why
        assert "were saved" in why or "was saved" in why
        directory.sweep()
        assert target.read_bytes() == content
    target.unlink()
    [(path, why)] = directory.damaged()
    assert "is not there" in why


def test_a_moved_file_is_known_by_its_digest_which_is_read_once(directory, target, monkeypatch):
    publish(directory, SaveId(0, 6), str(target))
    os.utime(target)
    reads = []
    real = claims.digest
    monkeypatch.setattr(claims, "digest", lambda path: reads.append(path) or real(path))
    assert ids(directory) == ids(directory) == [(0, 6)]
    assert reads == [target]


def test_of_two_records_with_the_same_bytes_the_newer_one_has_the_file(directory, target, fast_path):
    source = images(fast_path / "source", SaveId(0, 5))
    directory.publish(SaveId(0, 5), source, target=str(target))
    shutil.copytree(directory.path / ".fastckpt/checkpoint-0-5", fast_path / "record")
    directory.publish(SaveId(0, 6), source, target=str(target))
    revive(directory, SaveId(0, 5), fast_path / "record")
    assert ids(directory) == [(0, 6)]
    os.utime(target)
    assert ids(CheckpointDirectory(directory.path)) == [(0, 6)]


def test_an_older_file_put_back_counts_and_the_newer_one_is_reported(directory, target, fast_path):
    publish(directory, SaveId(0, 5), str(target))
    shutil.copytree(directory.path / ".fastckpt/checkpoint-0-5", fast_path / "record")
    shutil.copy(target, fast_path / "old.pt")
    publish(directory, SaveId(0, 6), str(target))
    revive(directory, SaveId(0, 5), fast_path / "record")
    shutil.copy(fast_path / "old.pt", target)
    assert ids(directory) == [(0, 5)]
    [(path, why)] = directory.damaged()
    assert path == target and "step 6 of history 0" in why


def test_a_file_of_the_users_own_at_the_target_is_replaced(directory, target):
    target.parent.mkdir(parents=True)
    target.write_bytes(b"theirs")
    publish(directory, SaveId(0, 5), str(target))
    assert assert_sound(directory) == [(0, 5)]


def test_links_are_followed_as_torch_save_follows_them(directory, target, fast_path):
    target.parent.mkdir(parents=True)
    target.symlink_to(fast_path / "real.pt")
    publish(directory, SaveId(0, 5), str(target))
    assert target.is_symlink() and directory.checkpoints()[0].path == fast_path / "real.pt"
    assert_sound(directory)


def test_the_default_path_is_the_default_layout(directory):
    publish(directory, SaveId(0, 5), str(directory.path / "checkpoint-5/model.pt"))
    assert directory.checkpoints()[0].manifest.target == ""


def test_the_same_id_at_two_paths(directory, target):
    publish(directory, SaveId(0, 5))
    publish(directory, SaveId(0, 5), str(target))
    publish(directory, SaveId(0, 6))
    assert assert_sound(directory) == [(0, 6), (0, 5)]
    directory.delete(SaveId(0, 5))
    assert assert_sound(directory) == [(0, 6)]
    assert not target.exists() and not (directory.path / "checkpoint-5").exists()


def test_paths_that_would_tear_another_checkpoint_are_refused(directory):
    publish(directory, SaveId(0, 5))
    for name in ("checkpoint-5/model.pt", ".fastckpt/x.pt", "latest_checkpointed_iteration.txt"):
        with pytest.raises(ConfigError, match="part of another checkpoint"):
            publish(directory, SaveId(0, 6), str(directory.path / name))
    assert assert_sound(directory) == [(0, 5)]


def test_a_directory_at_the_target_is_an_error_that_leaves_nothing(directory, target):
    publish(directory, SaveId(0, 5))
    target.mkdir(parents=True)
    (target / "theirs").touch()
    with pytest.raises(PersistError, match=r"ckpt\.pt: Is a directory"):
        publish(directory, SaveId(0, 6), str(target))
    assert assert_sound(directory) == [(0, 5)]
    assert not (directory.path / ".fastckpt/checkpoint-0-6").exists()
    assert_clean(directory)
