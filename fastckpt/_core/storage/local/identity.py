"""Distinguishes a checkpoint directory from another one that later takes its name."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from fastckpt._core.error_codes import coded
from fastckpt._core.io.directory_root import WITHOUT_LINKS, DirectoryRoot
from fastckpt._core.io.regular_file import read_small
from fastckpt.errors import PersistError

_NAME = ".fastckpt/identity"
_MARK = re.compile("[0-9a-f]{32}")


class DirectoryIdentity(NamedTuple):
    """Identity of a place: its mark ("" for none), and the inode of its directory (0 at a URL)."""

    mark: str
    inode: int = 0


def parsed(text: str) -> str:
    """A mark that was read; "" for an empty or torn one: its writer died, and nobody has seen it."""
    return text if _MARK.fullmatch(text) else ""


def identity(directory: Path) -> str:
    """Return the mark of this directory, which is gone when the directory is; "" for one without a mark.

    Raises OSError if its mark cannot be read: memory of a directory that does not answer for a moment must not pass
    for that of another one.
    """
    try:
        return parsed(read_small(directory / _NAME).decode(errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return ""


def inode(directory: Path) -> int:
    """The inode of a directory; 0 if there is none."""
    try:
        return directory.stat().st_ino
    except FileNotFoundError:
        return 0


Place = tuple[int, int]
"""Device and inode of a directory."""


def _place(directory: Path) -> Place | None:
    """The place of a directory, whichever links lead there; None if there is none."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@dataclass(frozen=True)
class KnownDirectory:
    """A marked directory in which a job saves, known from one that shows under its name when its mount is lost.

    Attributes:
        mark: Its mark.
        place: Its place when that was seen.
        above: The place of the directory that it was in.
    """

    mark: str
    place: Place | None
    above: Place | None

    @classmethod
    def of(cls, directory: Path, mark: str) -> Self:
        """Read the identity that is there now; raises OSError."""
        return cls(mark, _place(directory), _place(directory.parent))

    def is_removed(self, directory: Path) -> bool:
        """Return whether nothing has its name any more, so that it may be made, and marked, again.

        Raises PersistError if another directory has its name, OSError if that cannot be seen.
        """
        # The mark alone counts while it is there: a file system that is mounted again has another device number.
        if (found := identity(directory)) == self.mark:
            return False
        place = _place(directory)
        if not found and place is not None and place == self.place:
            return False  # it was emptied
        if place is None and _place(directory.parent) == self.above is not None:
            return True
        what = "it has another mark" if found else f"it has no {_NAME}"
        raise PersistError(
            coded(
                f"{directory} on {socket.gethostname()} is not the directory any more in which this job has saved: "
                f"{what}. Nothing is written there, and memory keeps the newest checkpoint. Mount its file system "
                "again, and that is persisted without a restart; if it was made again on purpose, start the job again",
                "FC-049",
            )
        )


def mark(directory: Path, claim: str) -> str:
    """Mark a directory with ``claim`` if it has no mark; returns its mark, which is durable.

    Of several who do so at once, the first wins. Returns "" if it cannot be written to now. Raises OSError if its
    mark cannot be read.
    """
    if found := identity(directory):
        return found
    path, files = directory / _NAME, DirectoryRoot(directory)
    with contextlib.suppress(OSError):  # it is full, read-only or gone, or somebody was first
        files.make_directory(path.parent)
        _put(files, path, claim)
        files.sync(path.parent)
        files.sync(directory)
    return identity(directory)


def _put(files: DirectoryRoot, path: Path, claim: str) -> None:
    """Make a mark that is there whole or not at all, unless somebody else has."""
    draft = path.with_name(f"tmp-{secrets.token_hex(6)}")
    files.write_text(draft, claim)
    try:
        files.link(draft, path)
    except FileExistsError:
        _fill(files, path, claim)  # with a crash between its creation and its writing, earlier versions left it empty
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        _fill(files, path, claim)
    finally:
        files.unlink(draft)


def _fill(files: DirectoryRoot, path: Path, claim: str) -> None:
    """Write a mark in its place, unless a whole one is there; where there are locks, one at a time does so."""
    descriptor = files.open(path, os.O_RDWR | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not parsed(os.pread(descriptor, 64, 0).decode(errors="replace")):
            if os.fstat(descriptor).st_nlink > 1:  # none that was left torn has another name: it may be anyone's file
                raise OSError(errno.EMLINK, "it has other names (hard links): remove it", str(path))
            os.pwrite(descriptor, claim.encode(), 0)
            os.ftruncate(descriptor, len(claim))
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
