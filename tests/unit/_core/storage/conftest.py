"""A place for the many small checkpoints of these tests, and processes that work on them together."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.support.small_disks import mounted, unmount
from tests.unit._core.storage.s3 import s3, s3_server  # noqa: F401 (fixtures)


class Plain(LocalFileSystem):
    """Some other file system that fsspec opens: files in directories, and no multipart uploads.

    It makes nothing exclusively but directories.
    """

    protocol = "plain"


fsspec.register_implementation("plain", Plain, clobber=True)


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory in memory: names and files behave there as on a disk, and fsync costs nothing."""
    path = Path(tempfile.mkdtemp(prefix="fastckpt-storage-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def directory(fast_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(fast_path / "dir")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; skips where mounting is not permitted."""
    path = mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=2M", "tmpfs")
    yield path
    unmount(path)


def at_once(count: int, act: Callable[[int], str]) -> list[str]:
    """What each of several processes returns that begin together."""
    fork = get_context("fork")
    start, said = fork.Barrier(count), fork.Queue()

    def begin(number: int) -> None:
        start.wait(60)
        said.put(act(number))

    children = [fork.Process(target=begin, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    found = [said.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    return found
