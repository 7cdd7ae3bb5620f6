"""Groups of processes with a limit of memory, for tests that exceed it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_group(name: str, mebibytes: int) -> Iterator[Path]:
    """A cgroup of version 1 whose members may take so much memory together; the test is skipped where none is made."""
    path = Path(f"/sys/fs/cgroup/memory/{name}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(mebibytes * 2**20))
    except OSError as error:
        if path.is_dir():
            path.rmdir()
        pytest.skip(f"cannot make a cgroup (version 1) with a memory limit: {error}")
    yield path
    path.rmdir()
