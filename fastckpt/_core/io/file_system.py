"""File systems: which one a directory is on, and whether it has the guarantees that checkpoints need."""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.io.regular_file import read_small

_TABLE = "/proc/self/mountinfo"
_OF_STORES = re.compile(
    r"(?i)\b(s3fs|goofys|geesefs|gcsfuse|rclone|mountpoint-s3|blobfuse2?|ossfs|cosfs|tosfs|obsfs)\b"
)
"""Programs that mount an object store, as they call themselves in the type or the source of a mount."""
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOTCONN)
"""Errors of a probe at a full, read-only or absent place, which may be another one later."""


class FileSystem(NamedTuple):
    """A mounted file system, as the kernel lists it.

    Attributes:
        kind: Its type, such as ``ext4``, ``nfs4`` or ``fuse.sshfs``.
        source: Mounted source: a device, an export, or a name that a program chose.
        options: Options of the file system, without those of the mount.
        mount_point: Directory at which it is mounted.
    """

    kind: str
    source: str
    options: tuple[str, ...]
    mount_point: str

    @property
    def is_of_a_store(self) -> bool:
        """True if a FUSE program shows an object store as this file system; renames of directories are not atomic."""
        return self.kind.startswith("fuse") and bool(_OF_STORES.search(f"{self.kind} {self.source}"))

    @property
    def is_served(self) -> bool:
        """True if a program or another machine serves the file system, with its own semantics."""
        return self.kind.startswith(("fuse", "9p", "cifs", "smb", "virtiofs"))

    @property
    def forgets(self) -> str:
        """Reason why a crash of the machine loses files that were synced there; empty if they survive."""
        if self.kind in ("tmpfs", "ramfs"):
            return "it is memory"
        if self.kind == "overlay" and {"volatile", "fsync=volatile"} & {*self.options}:
            return "it is an overlay with the option volatile, which syncs nothing"
        if self.kind in ("ext4", "xfs") and "nobarrier" in self.options:
            return "it is mounted with nobarrier, so its device may keep what was synced in a cache"
        return ""


def file_system_of(path: Path) -> FileSystem | None:
    """The file system that a path is on, or would be on; None if the kernel does not report it."""
    path = Path(os.path.realpath(path))
    try:
        text = Path(_TABLE).read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    found = [each for each in map(_parsed, text.splitlines()) if each and path.is_relative_to(each.mount_point)]
    # Of several at one mount point, the last one hides the others.
    return max(reversed(found), key=lambda each: len(each.mount_point), default=None)


def _parsed(line: str) -> FileSystem | None:
    # 36 35 98:0 /root /mount/point rw,noatime master:1 - type source rw,super,options
    before, _, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    if len(fields) < 6 or len(rest) < 3:
        return None
    return FileSystem(rest[0], _unescaped(rest[1]), tuple(rest[2].split(",")), _unescaped(fields[4]))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def fault_in_renames(directory: Path) -> str:
    """Return the fault of renames of directories or of exclusive creation; empty if there is none, or if it is unknown.

    It tries both, in a directory of its own that is gone afterwards.
    """
    files, private, name = DirectoryRoot(directory), directory / ".fastckpt", secrets.token_hex(6)
    # Where a sweep removes a killed process's files.
    place = private / f"tmp-{name}" if files.is_directory(private) else directory / f".fastckpt-probe-{name}"
    try:
        files.make_directory(place)
    except OSError:
        return ""  # the directory cannot be written to now, which others report
    try:
        return next(_faults(files, place), "")
    except OSError as error:
        return "" if error.errno in _PASSING else f"a new file cannot be written and read: {error.strerror}"
    finally:
        files.remove(place)


def _faults(files: DirectoryRoot, place: Path) -> Iterator[str]:
    before, after, text = place / "before", place / "after", secrets.token_hex(16)
    files.make_directory(before)
    files.write_text(before / "file", text)
    try:
        files.rename(before, after)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        yield f"a directory with files cannot be renamed: {error.strerror}"
        return
    with contextlib.suppress(OSError):
        if read_small(after / "file") == text.encode() and not files.exists(before):
            text = ""
    if text:
        yield "a directory that was renamed does not have its files at once"
    try:
        os.close(files.open(after / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        yield "a file that is there can be created a second time (O_EXCL)"
    except FileExistsError:
        pass
