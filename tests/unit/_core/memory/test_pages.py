"""Memory is reserved in large pages where there are some, and in any case."""

import os
import re

import pytest

from fastckpt._core.huge_pages import HUGE, window
from fastckpt._core.memory import pages
from fastckpt._core.memory.pages import allocate


@pytest.fixture
def descriptor():
    path = f"/dev/shm/fastckpt-test-{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink(path)
    yield descriptor
    os.close(descriptor)


def large(descriptor, size):
    """Bytes of a file that are mapped by large pages, when all are read."""
    with window(descriptor, 0, size) as part, part.view() as view:
        bytes(view)
        with open("/proc/self/smaps") as file:
            text = file.read()
        here = text[text.index(f"{part.address:x}-") :]
        return 1024 * int(re.search(r"ShmemPmdMapped: +(\d+) kB", here)[1])


@pytest.mark.parametrize("size", [1, HUGE - 1, HUGE, 3 * HUGE + 4097, 40 * 2**20])
def test_reserved_memory_is_allocated_in_full(descriptor, size):
    allocate(descriptor, size)
    found = os.fstat(descriptor)
    assert found.st_size == size
    assert size <= found.st_blocks * 512 < size + 4096  # not a large page too much
    assert os.pread(descriptor, size + 1, 0) == bytes(size)


def test_space_reserved_on_a_disk_is_allocated_at_once(tmp_path, monkeypatch):
    """Without large pages, which it has not; asking would write to the file for each."""
    monkeypatch.setattr(pages, "_ask_for_large_pages", lambda *_: pytest.fail("asked"))
    with (tmp_path / "file").open("w+b") as file:
        allocate(file.fileno(), 3 * HUGE + 4097)
        assert os.fstat(file.fileno()).st_blocks * 512 >= os.fstat(file.fileno()).st_size == 3 * HUGE + 4097


def test_reserved_memory_is_in_large_pages(descriptor, monkeypatch):
    monkeypatch.setattr(pages, "BUDGET", 1e6)
    probe = os.memfd_create("probe")
    os.pwrite(probe, b"\0", 0)
    os.ftruncate(probe, HUGE)
    with window(probe, 0, HUGE) as part:
        given = part.collapse()
    os.close(probe)
    if not given:
        pytest.skip("this kernel gives no large pages")
    size = 8 * HUGE + 100
    allocate(descriptor, size)
    assert large(descriptor, size) >= 4 * HUGE  # all, unless memory is fragmented


def test_a_reservation_stays_within_its_budget(descriptor, monkeypatch):
    monkeypatch.setattr(pages, "BUDGET", 0.0)
    monkeypatch.setattr(pages, "PIECE", HUGE)
    size = 8 * HUGE
    allocate(descriptor, size)
    assert large(descriptor, size) <= HUGE
    assert os.fstat(descriptor).st_blocks * 512 == size


def test_a_reservation_without_enough_memory_raises(tmp_path):
    import subprocess

    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "fastckpt-test", tmp_path], check=False).returncode:
        pytest.skip("mounting is not permitted")
    try:
        for size in (9 * 2**20, 8 * 2**20 + 1, 30 * 2**20):
            with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="No space left"):
                allocate(file.fileno(), size)
            (tmp_path / "file").unlink()
        with (tmp_path / "file").open("w+b") as file:
            allocate(file.fileno(), 8 * 2**20)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
