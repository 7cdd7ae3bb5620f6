"""A place for the many small checkpoints of these tests, and processes that are killed at work on them."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.unit._core.storage.s3 import s3, s3_server  # noqa: F401 (fixtures)

Crash = Callable[..., bool]


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


class Crasher:
    """A process that does deeds in children that kill themselves at a phase or file operation."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("crasher.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        )
        self.close = self._process.communicate

    def begin(self, directory: CheckpointDirectory, deed: str, id: SaveId, **how: Any) -> None:
        request = {"root": str(directory.path), "deed": deed, "id": id, **how}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def was_killed(self) -> bool:
        status = int(self._process.stdout.readline())
        assert status in (0, signal.SIGKILL)
        return status == signal.SIGKILL


@pytest.fixture(scope="module")
def crash() -> Iterator[Crash]:
    """Does a deed in a process that kills itself at a phase or file operation; returns whether it was killed."""
    crasher = Crasher()

    def do(*deed: Any, **how: Any) -> bool:
        crasher.begin(*deed, **how)
        return crasher.was_killed()

    yield do
    crasher.close()


@pytest.fixture
def kills(fast_path: Path, crash: Crash) -> Callable[..., Iterator[tuple[CheckpointDirectory, dict[str, Any], bool]]]:
    """Each file operation of a deed, killed before it, in a directory that was prepared; at last the whole deed.

    What prepares returns the deed. Each time there are the directory, the deed, and whether it was killed.
    """

    def at_each(prepare: Callable[[CheckpointDirectory], dict[str, Any]], least: int):
        for operation in itertools.count(1):
            directory = CheckpointDirectory(fast_path / str(operation) / "dir")
            deed = prepare(directory)
            killed = crash(directory, **deed, operation=operation)
            yield directory, deed, killed
            if not killed:
                break
            shutil.rmtree(directory.path.parent)
        assert operation > least

    return at_each
