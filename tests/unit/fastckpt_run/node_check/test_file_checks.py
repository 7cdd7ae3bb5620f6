"""Places for files that are full, read-only, missing, of the wrong kind, damaged or frozen: real file systems."""

import os
import subprocess

import pytest

from fastckpt._core.policy.node_check import Verdict
from fastckpt_run.node_check import file_checks
from fastckpt_run.node_check.check_process import CheckProcess
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


def test_a_place_that_is_full_read_only_missing_or_of_the_wrong_kind_has_a_problem(child, tmpfs, tmp_path):
    ballast = leave(tmpfs, 2 * MIB)
    assert disk(child, tmpfs).verdict is Verdict.OK
    ballast.unlink()
    leave(tmpfs, 0)
    for trouble in ("No space left on device", "Read-only file system"):
        for result in (disk(child, tmpfs), shm(child, tmpfs)):
            assert result.verdict is Verdict.PROBLEM and trouble in result.message
        subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
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
