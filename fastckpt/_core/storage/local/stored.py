"""One checkpoint on storage, and faults of its files."""

import errno
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from fastckpt._core.format.completeness import missing_of
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MAX_TEXT, MODEL, NAME, FileEntry, Manifest
from fastckpt._core.io.direct import Counted, digest_file
from fastckpt._core.io.read_errors import Phase, ReadVerdict, remedy, verdict
from fastckpt._core.io.regular_file import open_regular, read_small
from fastckpt.errors import BadCheckpoint, NewerFormat, PersistError

Read = TypeVar("Read")


@dataclass(frozen=True)
class Stored:
    """A checkpoint on storage, as its manifest describes it.

    Attributes:
        manifest: Manifest of its files.
        place: The directory of its manifest.
        target: The file that the user named for `MODEL`, if any.
    """

    manifest: Manifest
    place: Path
    target: Path | None

    @property
    def id(self) -> SaveId:
        """Id of the save."""
        return self.manifest.id

    @cached_property
    def missing(self) -> list[str]:
        """Files that a resume of as many ranks as saved would lack; empty for one that counts."""
        return missing_of(self.manifest)

    @property
    def path(self) -> Path:
        """Path that users know: the file that they named, while it is the checkpoint's own, else the directory."""
        return self.target if self.target and self.owns_target() else self.place

    def path_of(self, name: str) -> Path:
        """Return the path of a file; raises BadCheckpoint if the manifest does not name it."""
        return self.place / self.manifest.entry(name).name

    def files(self) -> dict[str, Path]:
        """Return the paths of all files, by name."""
        return {entry.name: self.place / entry.name for entry in self.manifest.files}

    def check_sizes(self) -> None:
        """Raise BadCheckpoint if a file is missing or not as long as recorded."""
        for entry in self.manifest.files:
            check_size(entry, self.place / entry.name)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read the files, by default all; raise BadCheckpoint if one is damaged."""
        entries = self.manifest.files if names is None else [self.manifest.entry(name) for name in names]
        for entry in entries:
            path = self.place / entry.name
            check_size(entry, path)
            check_digest(entry, path, digest(path))

    def owns_target(self) -> bool:
        """Return whether the file that the user named is this checkpoint's, and nobody has put another one there."""
        try:
            here, own = (self.target or self.place).stat(), self.path_of(MODEL).stat()
        except (OSError, BadCheckpoint):
            return False
        return is_copy(here, own)


def is_copy(one: os.stat_result, other: os.stat_result) -> bool:
    """Return whether two files are one, or one was copied from the other with its time."""
    return os.path.samestat(one, other) or (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def read_manifest(place: Path, name: str = NAME) -> Manifest | None:
    """The manifest in a directory, None if there is none.

    Raises BadCheckpoint if it cannot be read, PersistError if its file system does not answer now.
    """
    path = place / name
    try:
        text = answered(path, lambda: read_small(path, MAX_TEXT))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    try:
        return Manifest.from_json(text)
    except (BadCheckpoint, NewerFormat) as error:
        raise type(error)(f"{path}: {error}") from error


def ours(place: Path) -> Manifest | None:
    """The manifest in a place, if there is one that can be read."""
    try:
        return read_manifest(place)
    except (BadCheckpoint, PersistError):
        return None


def answered(path: Path, read: Callable[[], Read]) -> Read:
    """Read a file; raises PersistError for an error that proves nothing about the file.

    Such a file is not damaged: it must not be quarantined, nor an older one take its place.
    """
    try:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        return read()  # another machine has replaced or removed the open file: its name has another file now
    except (OSError, MemoryError) as error:
        if verdict(error, Phase.READING) is not ReadVerdict.NO_ANSWER:
            raise
        text = error.strerror if isinstance(error, OSError) else "no memory"
        raise PersistError(f"{path} cannot be read now: {text}. {remedy(error)}") from error


def with_manifests(places: Iterable[Path]) -> list[Path]:
    """Return the places with a manifest of ours, by its beginning, damaged or not: others use this name, too."""
    found = []
    for place in places:

        def begins(path: Path = place / NAME) -> bool:
            try:
                with os.fdopen(open_regular(path), "rb", buffering=0) as file:
                    return b'"fastckpt"' in file.read(32)
            except PermissionError:
                return False  # another user's directory, such as lost+found

        with suppress(OSError):
            if answered(place / NAME, begins):
                found.append(place)
    return found


def check_size(entry: FileEntry, path: Path) -> os.stat_result:
    """Look at a file; raises BadCheckpoint unless it is a regular one of the recorded size.

    Raises PersistError if its file system does not answer now.
    """
    try:
        found = answered(path, path.stat)
    except OSError as error:
        raise BadCheckpoint(f"{path} of {entry.size} bytes is not there: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise BadCheckpoint(f"{path} is no regular file; one of {entry.size} bytes was saved")
    if found.st_size != entry.size:
        raise BadCheckpoint(f"{path} has {found.st_size} bytes; {entry.size} were saved")
    return found


def check_digest(entry: FileEntry, path: Path, digest: str) -> None:
    """Raise BadCheckpoint if the digest of the read bytes is not the saved one."""
    if digest != entry.digest:
        raise BadCheckpoint(f"{path} is damaged: its xxh3-128 is {digest}; {entry.digest} was saved")


def digest(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """The digest of a file; raises BadCheckpoint if it cannot be read, PersistError if its file system is away.

    ``on_read`` is called with the number of bytes after each MiB or two.
    """
    try:
        return answered(path, lambda: digest_file(path, pace=Counted(on_read)) if on_read else digest_file(path))
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
