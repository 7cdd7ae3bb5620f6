"""Damage of every kind is found, named, and never harms the checkpoint before."""

import contextlib
import os
import re
import shutil

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import BadCheckpoint, PersistError
from tests.unit._core.storage.checkpoints import assert_sound, ids, publish

OLD, NEW = SaveId(0, 5), SaveId(0, 6)


@pytest.fixture(params=["default", "target"])
def directory(request, fast_path):
    directory = CheckpointDirectory(fast_path / "dir")
    publish(directory, OLD)
    publish(directory, NEW, str(fast_path / "user.pt") if request.param == "target" else "")
    return directory


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path):
    with path.open("ab") as file:
        file.write(b"x")


def empty(path):
    os.truncate(path, 0)


def remove(path):
    path.unlink()


def directory_instead(path):
    path.unlink()
    path.mkdir()


def dangling_link_instead(path):
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt"])
@pytest.mark.parametrize("harm", [truncate, lengthen, empty, remove, directory_instead, dangling_link_instead])
def test_files_of_another_size_do_not_count(directory, name, harm):
    path = directory.checkpoints()[0].path_of(name)
    harm(path)
    assert ids(directory) == [OLD]
    [(_, why)] = directory.scan().damaged
    assert str(path) in why and re.search(r"\d+ (bytes|were saved)", why)
    directory.sweep()
    assert [why for _, why in directory.scan().damaged] == [why]  # bad ones are kept for a person to look at


@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt"])
def test_a_flipped_bit_is_found_by_verify(directory, name):
    stored = directory.checkpoints()[0]
    path = stored.path_of(name)
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it, which tells nobody
    assert ids(directory) == [NEW, OLD]  # a scan looks at sizes only
    other = {"model.pt": "rank_0.pt", "rank_0.pt": "model.pt"}[name]
    directory.verify(stored, [other])
    with pytest.raises(BadCheckpoint, match=f"{path} is damaged: .* [0-9a-f]{{32}}; [0-9a-f]{{32}} was saved"):
        directory.verify(stored)
    with pytest.raises(BadCheckpoint, match="is damaged"):
        directory.verify(stored, [name])


def test_verify_names_what_is_missing(directory):
    stored = directory.checkpoints()[0]
    with pytest.raises(BadCheckpoint, match="no file 'other'"):
        directory.verify(stored, ["other"])
    stored.path_of("rank_0.pt").unlink()
    with pytest.raises(BadCheckpoint, match=r"rank_0.pt of 8 bytes is not there"):
        directory.verify(stored)


@contextlib.contextmanager
def as_nobody():
    """Without root's right to read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt"])
def test_a_file_that_this_user_may_not_read_is_an_error_and_not_damaged(directory, name):
    stored = directory.checkpoints()[0]
    stored.path_of(name).chmod(0)
    with as_nobody(), pytest.raises(PersistError, match=r"Permission denied.*Give this user the right"):
        directory.verify(stored)


@pytest.mark.parametrize("part", [".", ".fastckpt"])
def test_an_unreadable_directory_is_not_taken_for_empty(directory, fast_path, part):
    fast_path.chmod(0o755)
    (directory.path / part).chmod(0)
    with as_nobody(), pytest.raises(PersistError, match="Permission denied"):
        directory.checkpoints()
    (directory.path / part).chmod(0o700)


def garble(path):
    path.write_bytes(os.urandom(500))


def flip(path):
    text = bytearray(path.read_bytes())
    text[text.index(b'"step": ') + 8] ^= 1
    path.write_bytes(text)


@pytest.mark.parametrize("harm", [truncate, empty, garble, flip, directory_instead])
def test_a_damaged_manifest_is_reported(directory, harm):
    manifest = directory.checkpoints()[0].place / "manifest.json"
    harm(manifest)
    assert ids(directory) == [OLD]
    [(path, why)] = directory.scan().damaged
    assert path == manifest.parent and str(manifest) in why
    publish(directory, SaveId(0, 7))
    assert ids(directory) == [(0, 7), OLD]


def test_a_checkpoint_without_its_manifest_does_not_count(directory):
    """It is reported where it looks like one of ours, but it is not moved: it may be another tool's."""
    newest = directory.checkpoints()[0]
    (newest.place / "manifest.json").unlink()
    assert ids(directory) == [OLD]
    [(place, why)] = directory.scan().damaged
    assert place == newest.place and "has no manifest" in why
    with pytest.raises(PersistError, match="may be another tool's, and is not moved"):
        directory.quarantine(place, why)
    assert place.is_dir()


def test_a_manifest_in_another_steps_directory_is_reported(fast_path):
    directory = CheckpointDirectory(fast_path / "dir")
    publish(directory, OLD)
    shutil.copytree(directory.path / "checkpoint-5", directory.path / "checkpoint-9")
    assert ids(directory) == [OLD]
    [(path, why)] = directory.scan().damaged
    assert path == directory.path / "checkpoint-9" and "belongs in" in why


def test_a_damaged_checkpoint_is_quarantined_when_its_step_is_saved_again(fast_path):
    directory = CheckpointDirectory(fast_path / "dir")
    publish(directory, OLD)
    garble(directory.path / "checkpoint-5/manifest.json")
    publish(directory, SaveId(1, 5))
    assert assert_sound(directory) == [(1, 5)]
    [aside] = directory.path.glob(".fastckpt/quarantine-checkpoint-5-*")
    assert (aside / "model.pt").exists()
