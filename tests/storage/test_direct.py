"""Copies are equal, durable files; failures leave nothing."""

import errno
import os
import resource
import subprocess
import threading

import pytest
import xxhash

from fastckpt.storage import direct
from fastckpt.storage.direct import BLOCK, copy_file, digest_file

MiB = 2**20


def image(path, size):
    block = os.urandom(MiB)
    with path.open("wb") as file:
        for _ in range(size // MiB):
            file.write(block)
        file.write(block[: size % MiB])
    return path


@pytest.fixture(params=["disk", "tmpfs"])
def target(request, tmp_path):
    """A new path on a disk, which takes O_DIRECT, and on a tmpfs, which may refuse it."""
    if request.param == "disk":
        yield tmp_path / "target"
        return
    path = direct.Path(f"/dev/shm/fastckpt-test-{os.getpid()}-{os.urandom(4).hex()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "size", [0, 1, 511, 512, 4095, 4096, 4097, MiB - 1, MiB, MiB + 1, 2 * MiB + 4096, 7 * MiB + 5, BLOCK + MiB + 1]
)
def test_copies_are_equal(tmp_path, target, size, monkeypatch):
    if size < BLOCK:
        monkeypatch.setattr(direct, "BLOCK", MiB)
    source = image(tmp_path / "source", size)
    assert copy_file(source, target) == (size, xxhash.xxh3_128(source.read_bytes()).hexdigest())
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o600
    assert digest_file(target) == digest_file(source) == digest_file(target, direct=True)


def test_offsets_beyond_4_gib(tmp_path, monkeypatch):
    """Sparse on both sides: only windows at the ends and around 4 GiB are copied."""
    size, ends = 4 * 2**30 + 2 * BLOCK + 5, (0, 4 * 2**30 - BLOCK, 4 * 2**30, 4 * 2**30 + BLOCK, 4 * 2**30 + 2 * BLOCK)
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(size)
        for at in ends:
            file.seek(at)
            file.write(b"mark%d" % at if at + BLOCK < size else b"tail!")
    whole = range
    monkeypatch.setattr(direct, "range", lambda *_: [at for at in whole(0, size, BLOCK) if at in ends], raising=False)
    assert copy_file(source, target)[0] == size
    assert target.stat().st_size == size
    with source.open("rb") as left, target.open("rb") as right:
        for at in ends:
            left.seek(at), right.seek(at)
            assert left.read(MiB) == right.read(MiB)


def test_a_write_that_refuses_o_direct_goes_through_the_page_cache(tmp_path, monkeypatch):
    """As file systems do that take the flag at open but not at write: here, by misaligning every block."""
    monkeypatch.setattr(direct, "SECTOR", 1)
    source = image(tmp_path / "source", 3 * MiB + 7)
    size, digest = copy_file(source, tmp_path / "target")
    assert (size, digest) == (3 * MiB + 7, digest_file(source))
    assert digest_file(tmp_path / "target") == digest


def test_an_open_that_refuses_o_direct_is_repeated_without(tmp_path):
    mount = tmp_path / "ramfs"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "none", mount], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    try:
        source = image(tmp_path / "source", MiB + 7)
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(mount / "refused", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        assert copy_file(source, mount / "target") == (MiB + 7, digest_file(source))
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_an_existing_target_is_refused_and_left(tmp_path):
    source, target = image(tmp_path / "source", 10), image(tmp_path / "target", 20)
    with pytest.raises(FileExistsError):
        copy_file(source, target)
    assert target.stat().st_size == 20


def test_a_missing_source_makes_no_target(tmp_path):
    with pytest.raises(FileNotFoundError):
        copy_file(tmp_path / "source", tmp_path / "target")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [0, 4096, 3 * MiB + 5000])
def test_a_failed_write_leaves_no_target_and_no_descriptor(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(direct, "BLOCK", MiB)
    source = image(tmp_path / "source", 5 * MiB)
    descriptors = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            copy_file(source, tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_other_threads_run_meanwhile(tmp_path):
    """The agent's event loop lives in one: it gets turns while a copy and a digest go on."""
    source = image(tmp_path / "source", 200 * MiB)
    turns, done = 0, threading.Event()

    def work():
        copy_file(source, tmp_path / "target")
        digest_file(source)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 5
