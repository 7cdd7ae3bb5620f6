"""Directories that outlive a crash, and errors of storage with their remedies."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastckpt._core.byte_sizes import binary
from fastckpt._core.error_codes import coded
from fastckpt._core.io.modes import make_directory
from fastckpt._core.io.read_errors import remedy as read_remedy
from fastckpt._core.io.regular_file import IrregularFile
from fastckpt.errors import PersistError

REMEDIES = {
    errno.ENOSPC: "Free space there, keep fewer checkpoints (KeepLatestStepStrategy), or choose another directory",
    errno.EDQUOT: "Raise the quota, keep fewer checkpoints (KeepLatestStepStrategy), or choose another directory",
    errno.EFBIG: "Raise the limit on a file's size (ulimit -f), or choose a file system that takes larger files",
    errno.EROFS: "Remount the file system for writing, or choose another directory",
    errno.EACCES: "Give this user the right to write there, or choose another directory",
    errno.EPERM: "Give this user the right to write there, or choose another directory",
    errno.EISDIR: "Choose another path, or move away what is there",
    errno.ENOTDIR: "Choose another path, or move away what is there",
    errno.ELOOP: "Remove the link, or put in its place what it leads to",
}
_SYNCED_BY_ITSELF = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers to fsync of a directory from network file systems whose names are durable at once, and have no such call."""
OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(directory)
    finally:
        os.close(directory)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes: write(2) may write less than it was given, on a file system that is nearly full."""
    while data:
        data = data[os.write(descriptor, data) :]


def sync_names(directory: int) -> None:
    """Make the names in an open directory durable."""
    try:
        # A name, after a creation or a rename, is durable only once the directory that has it is synced.
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _SYNCED_BY_ITSELF:
            raise


def make_directories(path: Path) -> None:
    """Make a directory and those above it that are missing; their names are durable."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        make_directory(directory)
        # Level by level: a crash leaves directories that exist, never one whose parent is lost.
        sync_directory(directory.parent)


@contextlib.contextmanager
def explained(deed: str, place: Path, sources: Iterable[Path] = ()) -> Iterator[None]:
    """Turn an OSError into a PersistError with deed and path, bytes needed and free, and the remedy."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        where = error.filename2 or error.filename or place
        room = (
            f" It needs {_needed(sources)}; {_free(Path(os.fsdecode(where)))} is free." if number in OUT_OF_ROOM else ""
        )
        remedy = REMEDIES.get(number) or read_remedy(error) or "See the system's log for the cause, then try again"
        if isinstance(error, IrregularFile):
            remedy = "Remove it: fastckpt makes its own"
        text = f"cannot {deed} in {place}: {where}: {error.strerror or error}.{room} {remedy}."
        raise PersistError(coded(text, "FC-022")) from error


def _needed(sources: Iterable[Path]) -> str:
    try:
        return binary(sum(source.stat().st_size for source in sources))
    except OSError as error:
        # This is part of an error's text: a second error here must not hide the first.
        return f"an unknown size ({error})"


def _free(place: Path) -> str:
    try:
        # f_bavail, not f_bfree: blocks reserved for root are of no use to this user.
        stat = os.statvfs(next(p for p in (place, *place.parents) if p.exists()))
    except OSError as error:
        return f"an unknown size ({error})"
    return binary(stat.f_bavail * stat.f_frsize)
