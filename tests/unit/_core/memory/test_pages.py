"""Memory is reserved in large pages where there are some, and in any case."""

import mmap
import os
import re
import shutil
import subprocess
import threading
from itertools import product
from pathlib import Path

import pytest

from fastckpt._core.huge_pages import HUGE, window
from fastckpt._core.memory import pages
from fastckpt._core.memory.headroom import lies_in_memory
from fastckpt._core.memory.pages import allocate, enlarge, write_out


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


def now() -> threading.Event:
    """Somebody waits."""
    event = threading.Event()
    event.set()
    return event


@pytest.mark.parametrize("budget", [None, 0.0, 1e6], ids=["ahead", "in haste", "in haste, by several threads"])
def test_reserved_memory_is_allocated_in_full(descriptor, budget, monkeypatch):
    if budget is not None:
        monkeypatch.setattr(pages, "BUDGET", budget)
        monkeypatch.setattr(pages, "PIECE", HUGE)  # several threads have some
    for size in (1, HUGE, 3 * HUGE + 4097, 40 * 2**20):
        os.ftruncate(descriptor, 0)
        allocate(descriptor, size, *([] if budget is None else [now()]))
        found = os.fstat(descriptor)
        assert found.st_size == size <= found.st_blocks * 512 < size + 4096  # not a large page too much
        assert os.pread(descriptor, size + 1, 0) == bytes(size)


@pytest.fixture
def large_pages(descriptor):
    """Large pages are to be had."""
    os.ftruncate(descriptor, HUGE)
    os.pwrite(descriptor, b"\0", 0)
    with window(descriptor, 0, HUGE) as part:
        if not part.collapse():
            pytest.skip("this kernel gives no large pages")
    os.ftruncate(descriptor, 0)


@pytest.mark.usefixtures("large_pages")
@pytest.mark.parametrize("urgent", [threading.Event(), now()], ids=["ahead", "in haste"])
def test_reserved_memory_is_in_large_pages(descriptor, monkeypatch, urgent):
    monkeypatch.setattr(pages, "BUDGET", 1e6)
    size = 8 * HUGE + 100
    assert allocate(descriptor, size, urgent)
    assert large(descriptor, size) >= 4 * HUGE  # all, unless memory is fragmented


@pytest.mark.parametrize(("budget", "urgent"), [("BUDGET", [now()]), ("PATIENCE", [])], ids=["in haste", "ahead"])
def test_a_reservation_stays_within_its_budget(descriptor, monkeypatch, budget, urgent):
    monkeypatch.setattr(pages, budget, 0.0)
    monkeypatch.setattr(pages, "PIECE", HUGE)
    monkeypatch.setattr(pages, "MOST_THREADS", 1)
    size = 8 * HUGE
    assert not allocate(descriptor, size, *urgent)
    assert large(descriptor, size) <= HUGE
    assert os.fstat(descriptor).st_blocks * 512 == size
    assert not enlarge(descriptor, size, now()), "making pages large ends when a save waits"


@pytest.mark.usefixtures("large_pages")
def test_what_others_write_while_pages_are_made_large_is_kept(descriptor, monkeypatch):
    """A worker writes to its mapping of the image, as a save does, while the agent moves it into large pages."""
    monkeypatch.setattr(pages, "PIECE", HUGE)
    size = 16 * HUGE
    os.ftruncate(descriptor, size)
    os.posix_fallocate(descriptor, 0, size)
    memory = mmap.mmap(descriptor, size)
    expected, stop = bytearray(size), threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value = value % 250 + 1
            for offset in range(value * 16, size, 64 * 1024):
                memory[offset : offset + 8] = expected[offset : offset + 8] = bytes([value]) * 8

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            assert enlarge(descriptor, size, threading.Event())
    finally:
        stop.set()
        writer.join()
    assert memory[:] == expected
    assert large(descriptor, size) >= 8 * HUGE
    memory.close()


def test_a_reservation_without_enough_memory_raises(small_tmpfs):
    path = small_tmpfs(8) / "file"
    for size, urgent in product((9 * 2**20, 8 * 2**20 + 1, 30 * 2**20), (threading.Event(), now())):
        with path.open("w+b") as file, pytest.raises(OSError, match="No space left"):
            allocate(file.fileno(), size, urgent)
        path.unlink()
    with path.open("w+b") as file:
        allocate(file.fileno(), 8 * 2**20)
    path.unlink()


def test_what_is_written_out_to_a_disk_leaves_the_page_cache(tmp_path: Path) -> None:
    if lies_in_memory(tmp_path) or not shutil.which("fincore"):
        pytest.skip("temporary files are in memory here, or there is no fincore")
    path, data, size = tmp_path / "copy", os.urandom(1 << 20), 32 << 20
    with path.open("xb+") as file:
        allocate(file.fileno(), size)
        for offset in range(0, size, 1 << 20):
            write_out(file.fileno(), memoryview(data), offset)
        os.fsync(file.fileno())  # as the kernel does in its own time
        write_out(file.fileno(), memoryview(data), size - (1 << 20))
        command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
        assert int(subprocess.run(command, capture_output=True, check=True).stdout) <= size // 8
    assert path.read_bytes() == data * 32
