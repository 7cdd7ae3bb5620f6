"""A place for the many small checkpoints of these tests."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory in memory: names and files behave there as on a disk, and fsync costs nothing."""
    path = Path(tempfile.mkdtemp(prefix="fastckpt-storage-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
