"""A writer and a reader of checkpoints, in a job of one rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt.dcp import SharedMemoryReader, SharedMemoryWriter


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SharedMemoryWriter]:
    with SharedMemoryWriter(tmp_path / "run") as made:
        yield made


@pytest.fixture
def reader(writer: SharedMemoryWriter) -> SharedMemoryReader:
    return SharedMemoryReader(writer)
