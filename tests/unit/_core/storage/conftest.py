"""A place for the many small checkpoints of these tests, and processes that are killed at work on them."""

import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.unit._core.storage.crasher import die_at_operation, die_at_phase
from tests.unit._core.storage.s3 import s3, s3_server  # noqa: F401 (fixtures)

Act = Callable[[CheckpointDirectory], object]


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory in memory: names and files behave there as on a disk, and fsync costs nothing."""
    path = Path(tempfile.mkdtemp(prefix="fastckpt-storage-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def directory(fast_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(fast_path / "dir")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to read and write everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def killed(directory: CheckpointDirectory, act: Act, *, phase: str = "", operation: int = 0) -> bool:
    """Do something in a child that kills itself at a phase or before a file operation; whether it came to that."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            if phase:
                die_at_phase(phase)
            if operation:
                die_at_operation(operation, str(directory.path))
            act(CheckpointDirectory(directory.path))
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


def killed_at_each(folder: Path, prepare: Act, act: Act, least: int) -> Iterator[tuple[CheckpointDirectory, bool]]:
    """Prepared directories in which something was killed before each of its file operations; at last it was not."""
    for operation in itertools.count(1):
        directory = CheckpointDirectory(folder / str(operation) / "dir")
        prepare(directory)
        was_killed = killed(directory, act, operation=operation)
        yield directory, was_killed
        if not was_killed:
            break
        shutil.rmtree(directory.path.parent)
    assert operation > least


def at_once(count: int, act: Callable[[int], str]) -> list[str]:
    """What each of several processes returns that begin together."""
    start, go = os.pipe()
    pipes = []
    for number in range(count):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.close(go)
                os.read(start, 1)
                os.write(writer, act(number).encode())
            finally:
                os._exit(0)
        os.close(writer)
        pipes.append(reader)
    os.close(go)
    os.close(start)
    said = []
    for reader in pipes:
        with os.fdopen(reader) as pipe:
            said.append(pipe.read())
        os.wait()
    return said
