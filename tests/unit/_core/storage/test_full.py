"""Storage that refuses writes: full, a file size limit, read-only, forbidden, failing."""

import contextlib
import os
import re
import subprocess

import pytest

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import PersistError
from tests.support.largest_file import largest_file
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, images, publish

MiB = 2**20


@pytest.fixture
def small(tmp_path):
    """A directory in a file system of 8 MiB of its own."""
    mount = tmp_path / "mount"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8M", "fastckpt-test", str(mount)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    yield CheckpointDirectory(mount / "dir")
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def save(tmp_path):
    """Publishes a step to a path of the user."""

    def do(directory, step, size=0, largest=0):
        source = images(tmp_path / "source", SaveId(0, step))
        if size:
            source["model.pt"].write_bytes(os.urandom(size))
        with largest_file(largest) if largest else contextlib.nullcontext():
            directory.publish(PublishRequest(SaveId(0, step), source, target=str(directory.path / "ckpt.pt")))

    return do


def test_a_disk_full_at_any_byte_keeps_the_checkpoint_before(small, save):
    """The end of the space falls into every file in turn: images, draft, manifest, directories."""
    save(small, 1)
    for size in (8 * MiB - 9000, 9 * MiB):
        no_space = rf"No space left.*needs {re.escape(binary(size + 8))}.*MiB is free\. Free space"
        with pytest.raises(PersistError, match=no_space):
            save(small, 9, size)
        assert assert_sound(small) == [(0, 1)]
        assert_clean(small)
    outcomes, filler = [], small.path.parent / "filler"
    for pages in range(0, 30):
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        os.truncate(filler, max(0, filler.stat().st_size // 4096 - pages) * 4096)
        try:
            save(small, 2)
            break
        except PersistError as error:
            outcomes.append(str(error))
            assert assert_sound(small) == [(0, 1)]
            assert_clean(small)
        filler.unlink()
    assert outcomes and all("No space left" in error for error in outcomes)
    assert assert_sound(small)[0] == (0, 2)


def test_a_file_size_limit_fails_a_publication_and_a_file_has_no_checkpoints(tmp_path, save):
    directory = CheckpointDirectory(tmp_path / "dir")
    publish(directory, SaveId(0, 1))
    too_large = r"File too large\. It needs 3\.0 MiB; .* Raise the limit"
    with pytest.raises(PersistError, match=too_large):
        save(directory, 9, 3 * MiB, largest=MiB)
    assert assert_sound(directory) == [(0, 1)]
    assert_clean(directory)
    (tmp_path / "file").write_text("a file")
    directory = CheckpointDirectory(tmp_path / "file")
    for deed in (directory.checkpoints, directory.scan, lambda: publish(directory, SaveId(0, 1))):
        with pytest.raises(PersistError, match=r"Not a directory\. Choose another path"):
            deed()


def test_a_retired_checkpoint_is_restored_when_the_new_one_is_refused(tmp_path, monkeypatch):
    """The rename is forbidden, to root as well, after everything was written."""
    directory = CheckpointDirectory(tmp_path / "dir")
    publish(directory, SaveId(0, 5))

    def freeze(phase, fields):
        if phase != "persist.rename":
            return
        if subprocess.run(["chattr", "+i", directory.path], check=False, capture_output=True).returncode:
            pytest.skip("chattr +i is not permitted")

    monkeypatch.setattr(metrics, "_observers", [freeze])
    try:
        with pytest.raises(PersistError, match=r"Operation not permitted\. Give this user"):
            publish(directory, SaveId(1, 5))
        monkeypatch.undo()
        assert assert_sound(directory) == [(0, 5)]  # where it was retired to: it cannot be put back for now
    finally:
        subprocess.run(["chattr", "-i", directory.path], check=False)
    assert directory.sweep() == [directory.path / "checkpoint-5"]
    assert assert_sound(directory) == [(0, 5)]
    publish(directory, SaveId(1, 5))
    assert assert_sound(directory) == [(1, 5)]
    assert_clean(directory)
