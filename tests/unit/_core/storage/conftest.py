"""A place for the many small checkpoints of these tests, and processes that are killed at work on them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory

ROOT = Path(__file__).parents[4]


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory in memory: names and files behave there as on a disk, and fsync costs nothing."""
    path = Path(tempfile.mkdtemp(prefix="fastckpt-storage-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def crash():
    """Does a deed in a process that kills itself at a phase or file operation; returns whether it was killed."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("crasher.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:

        def do(directory: CheckpointDirectory, deed: str, id: SaveId, **how) -> bool:
            process.stdin.write(json.dumps({"root": str(directory.path), "deed": deed, "id": id, **how}) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            assert status in (0, signal.SIGKILL)
            return status == signal.SIGKILL

        yield do
        process.stdin.close()
