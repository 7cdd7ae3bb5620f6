"""Copies are equal, durable files; failures leave nothing."""

import ctypes
import errno
import mmap
import os
import tempfile
from pathlib import Path

import pytest
import xxhash

from fastckpt._core.io import direct, unbuffered
from fastckpt._core.io.direct import BLOCK, copy_file, digest_file
from tests.support.largest_file import largest_file
from tests.support.small_disks import mounted, unmount

MiB = 2**20
GiB = 2**30


def image(path, size):
    block = os.urandom(MiB)
    with path.open("wb") as file:
        for _ in range(size // MiB):
            file.write(block)
        file.write(block[: size % MiB])
    return path


@pytest.fixture
def memory():
    """A directory in memory, which may refuse O_DIRECT; the other one of a test is on a disk, which takes it."""
    with tempfile.TemporaryDirectory(prefix=f"fastckpt-test-{os.getpid()}-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(params=["disk", "tmpfs"])
def place(request, tmp_path, memory):
    return tmp_path if request.param == "disk" else memory


def test_copied_files_are_equal(place, tmp_path, memory, monkeypatch):
    monkeypatch.setattr(direct, "BLOCK", MiB)
    for size in (0, 1, 511, 4096, 4097, MiB - 1, MiB, 7 * MiB + 5):
        source = image(place / f"source-{size}", size)
        for target in (tmp_path / f"target-{size}", memory / f"target-{size}"):
            assert copy_file(source, target) == (size, xxhash.xxh3_128(source.read_bytes()).hexdigest())
            assert target.read_bytes() == source.read_bytes()
            assert digest_file(target) == digest_file(source) == digest_file(target, direct=True)


SIZES = {
    "beyond 4 GiB": (4 * GiB + 3 * MiB + 5, (0, 4 * GiB - 4100, 4 * GiB - 5, 4 * GiB + MiB, 4 * GiB + 3 * MiB - 15)),
    "ends in holes": (BLOCK + MiB + 7, (5000, BLOCK - 4)),
    "nothing but a hole": (BLOCK + 4097, ()),
    "every other sector": (2 * MiB + 1, range(0, 2 * MiB, 8192)),
}


@pytest.mark.parametrize(("size", "islands"), SIZES.values(), ids=SIZES)
def test_holes_of_sparse_files_are_neither_read_nor_written(memory, tmp_path, size, islands):
    """In a tmpfs reading them through a mapping would fill them with memory."""
    source, target = (tmp_path if size > GiB else memory) / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(size)
        for at in islands:
            os.pwrite(file.fileno(), b"island %d" % at, at)

    def stored(path):
        return path.stat().st_blocks * 512

    before = stored(source)
    assert before < 2 * MiB
    copied = copy_file(source, target)
    assert copied == (size, digest_file(source, direct=True)) == (size, digest_file(target, direct=True))
    assert target.stat().st_size == size
    assert stored(source) <= before + MiB // 8 and stored(target) <= before + MiB // 8
    with target.open("rb") as file:
        assert all(os.pread(file.fileno(), 7, at) == b"island " for at in islands)


def cached(path):
    """Bytes of a file that lie in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as memory:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


class Watch:
    """A pace that looks at the page cache before each block."""

    portion = None

    def __init__(self, path):
        self.path, self.most = path, 0

    def wait_for(self, count):
        self.most = max(self.most, cached(self.path))


def test_copies_do_not_fill_the_page_cache(tmp_path, monkeypatch):
    size = 20 * MiB + 7
    monkeypatch.setattr(direct, "BLOCK", 2 * MiB)
    source, way, fallback = image(tmp_path / "source", size), tmp_path / "direct", tmp_path / "fallback"
    watch = Watch(way)
    _, digest = copy_file(source, way, watch)
    assert watch.most == 0 and cached(way) == 0
    assert digest_file(way) == digest
    assert cached(way) > size - MiB  # all, unless the kernel reclaimed a page meanwhile
    assert digest_file(way, direct=True) == digest  # reading back bypasses the page cache
    assert cached(way) == 0
    monkeypatch.setattr(os, "O_DIRECT", 0)
    watch = Watch(fallback)
    copy_file(source, fallback, watch)
    assert 0 < watch.most <= 2 * direct.BLOCK  # what was written last, and the one before
    assert cached(fallback) == 0
    assert fallback.read_bytes() == way.read_bytes() == source.read_bytes()


def test_a_write_that_refuses_o_direct_goes_through_the_page_cache(tmp_path, monkeypatch):
    """As file systems do that take the flag at open but not at write: here, by misaligning every block."""
    monkeypatch.setattr(unbuffered, "SECTOR", 1)
    source = image(tmp_path / "source", 3 * MiB + 7)
    size, digest = copy_file(source, tmp_path / "target")
    assert (size, digest) == (3 * MiB + 7, digest_file(source))
    assert digest_file(tmp_path / "target") == digest


def test_an_open_that_refuses_o_direct_is_repeated_without(tmp_path):
    mount = mounted(tmp_path / "ramfs", "-t", "ramfs", "none")
    source = image(tmp_path / "source", MiB + 7)
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(mount / "refused", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    assert copy_file(source, mount / "target") == (MiB + 7, digest_file(source))
    unmount(mount)


SOURCES = {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(__file__), "directory": Path.mkdir}


def test_what_is_no_file_is_not_copied_and_no_file_written_over(tmp_path: Path):
    """It is in place of an image: nobody waits for a pipe's writer, or follows a link elsewhere."""
    target = tmp_path / "target"
    for kind in (*SOURCES, "nothing"):
        SOURCES.get(kind, str)(tmp_path / kind)
        with pytest.raises(FileNotFoundError if kind == "nothing" else OSError, match=kind):
            copy_file(tmp_path / kind, target)
        assert not target.exists()
    image(target, 20)
    with pytest.raises(FileExistsError):
        copy_file(image(tmp_path / "true", 10), target)
    assert target.stat().st_size == 20


def test_a_source_that_shrinks_during_the_copy_is_an_error(tmp_path):
    """Through a mapping it would end this process."""
    source = image(tmp_path / "source", 3 * MiB)

    class Shrink:
        portion = MiB

        def wait_for(self, _):
            os.truncate(source, MiB)

    with pytest.raises(OSError, match="the source ends at 1048576"):
        copy_file(source, tmp_path / "target", Shrink())
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("limit", [0, 3 * MiB + 5000])
def test_a_failed_write_leaves_no_target_and_no_descriptor(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(direct, "BLOCK", MiB)
    source = image(tmp_path / "source", 5 * MiB)
    descriptors = len(os.listdir("/proc/self/fd"))
    with largest_file(limit), pytest.raises(OSError) as caught:
        copy_file(source, tmp_path / "target")
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert len(os.listdir("/proc/self/fd")) == descriptors
