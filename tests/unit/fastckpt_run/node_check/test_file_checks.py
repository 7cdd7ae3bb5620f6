"""Places for files that are full, read-only, missing, of the wrong kind, damaged or frozen: real file systems."""

import os
import subprocess

import pytest

from fastckpt._core.policy.node_check import Verdict
from fastckpt_run.node_check import file_checks
from fastckpt_run.node_check.check_process import CheckProcess
from fastckpt_run.node_check.file_checks import check_disk, check_shm
from tests.support.small_disks import leave, mounted, unmount

MIB = 1 << 20


@pytest.fixture
def tmpfs(tmp_path):
    path = mounted(tmp_path / "tmpfs", "-t", "tmpfs", "-o", "size=24m", "tmpfs")
    yield path
    unmount(path)


@pytest.fixture(scope="module")
def child():
    """Answers as the commands get them, where an OSError becomes a result."""
    with CheckProcess(60.0) as process:
        process.run({"check": "memory", "name": "memory", "size": MIB, "seconds": 0.0})  # begins the process
        yield process


def disk(child, path):
    return child.run({"check": "disk", "name": "disk", "directory": str(path), "size": 4 * MIB, "seconds": 0.1})


def shm(child, path):
    return child.run({"check": "shm", "name": "shm", "directory": str(path), "size": 4 * MIB, "in_memory": True})


def test_places_that_are_well_pass_and_nothing_is_left(tmp_path, tmpfs):
    there = tmp_path / "there"
    there.mkdir()
    assert check_disk("disk", str(there), 4 * MIB, 0.1).verdict is Verdict.OK
    result = check_shm("shm", str(tmpfs), True, 4 * MIB)
    assert (result.verdict, result.unit) == (Verdict.OK, "MB") and 0 < result.value < 24
    assert check_shm("shm", str(there), False, 4 * MIB).verdict is Verdict.OK  # --fast-no-memory
    assert [*there.iterdir()] == [*tmpfs.iterdir()] == []


def test_a_full_or_read_only_place_has_a_problem_and_a_small_one_has_none(child, tmpfs):
    ballast = leave(tmpfs, 2 * MIB)
    assert disk(child, tmpfs).verdict is Verdict.OK
    ballast.unlink()
    leave(tmpfs, 0)
    for trouble in ("No space left on device", "Read-only file system"):
        for result in (disk(child, tmpfs), shm(child, tmpfs)):
            assert result.verdict is Verdict.PROBLEM and trouble in result.message
        subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)


def test_a_place_that_is_missing_or_no_directory_or_no_tmpfs_has_a_problem(child, tmp_path):
    (tmp_path / "file").touch()
    for check in (disk, shm):
        assert "No such file" in check(child, tmp_path / "nowhere").message
    assert "Not a directory" in disk(child, tmp_path / "file").message
    assert shm(child, tmp_path).message == f"{tmp_path} is no tmpfs; name one (--fast-shm-dir)"


def test_a_block_that_storage_has_changed_or_put_elsewhere_or_lost_is_found(tmp_path):
    seed = os.urandom(MIB)
    path = tmp_path / "blocks"
    path.write_bytes(file_checks._block(seed, 0) + file_checks._block(seed, 1))
    buffer = bytearray(MIB)

    def sound(number):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return file_checks._is_block(descriptor, memoryview(buffer), seed, number)
        finally:
            os.close(descriptor)

    assert sound(0) and sound(1) and not sound(2)
    content = bytearray(path.read_bytes())
    content[MIB + 12345] ^= 4
    path.write_bytes(content)
    assert sound(0) and not sound(1)
    path.write_bytes(file_checks._block(seed, 1) + file_checks._block(seed, 0))
    assert not sound(0) and not sound(1)
