"""A place on this node's disk for files that are downloaded to be loaded."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

from fastckpt.errors import PersistError


def staging_path(arena: Path) -> Path:
    """Return the directory into which the writers of an arena download, and nobody else: below TMPDIR.

    The name follows from the arena's, so that its next owner can remove files that a dead job left.
    """
    return Path(tempfile.gettempdir()) / f"{arena.name}-staging"


def make_staging(path: Path) -> None:
    """Make the place, if no local rank has yet; raises PersistError if somebody else has."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise PersistError(f"cannot download to {path}: {error.strerror}. Choose another TMPDIR.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PersistError(f"{path} is not a private directory of this user; remove it, or choose another TMPDIR")


def remove_staging(path: Path) -> None:
    """Remove the place and all that is in it, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
