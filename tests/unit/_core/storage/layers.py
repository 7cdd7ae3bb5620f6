"""Directories that cannot be renamed, as those in a lower layer of an overlay."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def lower_layer(root: Path) -> Iterator[None]:
    """Let no directory be renamed that is there now; all else is as on any file system."""
    lower = {path.lstat().st_ino for path in root.rglob("*") if path.is_dir()}
    real = os.rename

    def rename(source: Any, target: Any, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        found = os.lstat(source, dir_fd=src_dir_fd)
        if stat.S_ISDIR(found.st_mode) and found.st_ino in lower:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
        real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename)
        yield
