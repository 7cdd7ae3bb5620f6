"""Storage that refuses writes: full, a file size limit, read-only, forbidden, failing."""

import contextlib
import os
import resource
import subprocess

import pytest

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import PersistError
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, images, publish

MiB = 2**20


@pytest.fixture
def small(tmp_path):
    """A file system of 8 MiB of its own."""
    mount = tmp_path / "mount"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8M", "fastckpt-test", str(mount)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def large(tmp_path, size):
    source = images(tmp_path / "large", SaveId(0, 9))
    source["model.pt"].write_bytes(os.urandom(size))
    return source


@pytest.mark.parametrize("target", ["", "ckpt.pt"])
@pytest.mark.parametrize("size", [8 * MiB - 9000, 9 * MiB, 40 * MiB])
def test_a_full_disk_fails_a_publication_and_keeps_the_one_before(small, tmp_path, target, size):
    directory = CheckpointDirectory(small / "dir")
    publish(directory, SaveId(0, 1), target and str(directory.path / target))
    source = large(tmp_path, size)
    for _ in range(2):
        with pytest.raises(PersistError) as caught:
            directory.publish(PublishRequest(SaveId(0, 9), source, target=target and str(directory.path / target)))
        assert "No space left" in str(caught.value) and "MiB is free. Free space" in str(caught.value)
        assert f"needs {binary(size + 8)}" in str(caught.value)
        assert assert_sound(directory) == [(0, 1)]
        assert_clean(directory)
    source["model.pt"].write_bytes(b"small")
    directory.publish(PublishRequest(SaveId(0, 9), source, target=target and str(directory.path / target)))
    assert directory.checkpoints()[0].id == (0, 9)


@pytest.mark.parametrize("target", ["", "ckpt.pt"])
def test_a_disk_full_at_any_byte_keeps_the_checkpoint_before(small, tmp_path, target):
    """The end of the space falls into every file in turn: images, draft, manifest, directories."""
    directory = CheckpointDirectory(small / "dir")
    publish(directory, SaveId(0, 1), target and str(directory.path / target))
    source = images(tmp_path / "source", SaveId(0, 2))
    outcomes = set()
    for pages in range(0, 30):
        filler = small / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        os.truncate(filler, max(0, filler.stat().st_size // 4096 - pages) * 4096)
        try:
            directory.publish(PublishRequest(SaveId(0, 2), source, target=target and str(directory.path / target)))
            outcomes.add("published")
        except PersistError as error:
            assert "No space left" in str(error)
            outcomes.add("refused")
            assert assert_sound(directory) == [(0, 1)]
            assert_clean(directory)
        filler.unlink()
        if "published" in outcomes:
            break
    assert outcomes == {"published", "refused"}
    assert assert_sound(directory)[0] == (0, 2)


@pytest.mark.parametrize("target", ["", "ckpt.pt"])
def test_a_read_only_disk_fails_publication_and_deletion(small, tmp_path, target):
    directory = CheckpointDirectory(small / "dir")
    publish(directory, SaveId(0, 1))
    publish(directory, SaveId(0, 2))
    source, named = images(tmp_path / "source", SaveId(0, 3)), target and str(directory.path / target)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(PersistError, match=r"Read-only file system\. Remount"):
        directory.publish(PublishRequest(SaveId(0, 3), source, target=named))
    with pytest.raises(PersistError, match="Read-only"):
        directory.delete(SaveId(0, 1))
    with pytest.raises(PersistError, match="Read-only"):
        directory.sweep()
    assert assert_sound(directory) == [(0, 2), (0, 1)]
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    directory.publish(PublishRequest(SaveId(0, 3), source, target=named))
    assert assert_sound(directory)[0] == (0, 3)


@pytest.mark.parametrize("target", ["", "ckpt.pt"])
def test_a_file_size_limit_fails_a_publication(tmp_path, target):
    """Where mounting is not permitted: the kernel refuses in the middle of an image."""
    directory = CheckpointDirectory(tmp_path / "dir")
    publish(directory, SaveId(0, 1))
    source = large(tmp_path, 3 * MiB)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, before[1]))
    try:
        with pytest.raises(PersistError, match=r"File too large\. It needs 3\.0 MiB; .* Raise the limit"):
            directory.publish(PublishRequest(SaveId(0, 9), source, target=target and str(directory.path / target)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert assert_sound(directory) == [(0, 1)]
    assert_clean(directory)


@pytest.fixture
def frozen(tmp_path):
    """Forbids changes to a directory, to root as well."""
    done = []

    def freeze(path):
        if subprocess.run(["chattr", "+i", path], check=False, capture_output=True).returncode:
            pytest.skip("chattr +i is not permitted")
        done.append(path)

    yield freeze
    for path in done:
        subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.parametrize("target", ["", "ckpt.pt"])
def test_a_forbidden_rename_fails_a_publication_and_keeps_the_one_before(tmp_path, frozen, target):
    """The rename is refused, after everything was written."""
    directory = CheckpointDirectory(tmp_path / "dir")
    publish(directory, SaveId(0, 1))
    frozen(directory.path)
    with pytest.raises(PersistError, match=r"Operation not permitted\. Give this user"):
        publish(directory, SaveId(0, 2), target and str(directory.path / target))
    assert assert_sound(directory) == [(0, 1)]
    assert_clean(directory)


def test_a_retired_checkpoint_is_restored_when_the_new_one_is_refused(tmp_path, frozen, monkeypatch):
    directory = CheckpointDirectory(tmp_path / "dir")
    publish(directory, SaveId(0, 5))

    def freeze(phase, fields):
        if phase == "persist.rename":
            frozen(directory.path)

    monkeypatch.setattr(metrics, "_observers", [freeze])
    with pytest.raises(PersistError, match="Operation not permitted"):
        publish(directory, SaveId(1, 5))
    monkeypatch.undo()
    assert assert_sound(directory) == [(0, 5)]  # where it was retired to: it cannot be put back for now
    subprocess.run(["chattr", "-i", directory.path], check=True)
    assert directory.sweep() == [directory.path / "checkpoint-5"]
    assert assert_sound(directory) == [(0, 5)]
    publish(directory, SaveId(1, 5))
    assert assert_sound(directory) == [(1, 5)]
    assert_clean(directory)


def test_a_file_in_place_of_the_checkpoint_directory_is_an_error(tmp_path):
    (tmp_path / "dir").write_text("a file")
    directory = CheckpointDirectory(tmp_path / "dir")
    for deed in (directory.checkpoints, directory.scan, lambda: publish(directory, SaveId(0, 1))):
        with pytest.raises(PersistError, match=r"Not a directory\. Choose another path"):
            deed()


def test_an_unwritable_tracker_does_not_fail_a_durable_checkpoint(tmp_path, caplog):
    directory = CheckpointDirectory(tmp_path / "dir")
    (directory.path / "latest_checkpointed_iteration.txt").mkdir(parents=True)
    publish(directory, SaveId(0, 1))
    assert assert_sound(directory) == [(0, 1)]
    assert_clean(directory)
    assert "latest_checkpointed_iteration.txt" in caplog.text


def test_a_directory_in_the_proc_file_system_is_an_error(tmp_path):
    directory = CheckpointDirectory(tmp_path / "dir")
    publish(directory, SaveId(0, 1))
    with pytest.raises(PersistError, match="/proc"):
        publish(directory, SaveId(0, 2), "/proc/ckpt.pt")
    assert assert_sound(directory) == [(0, 1)]
    assert_clean(directory)
