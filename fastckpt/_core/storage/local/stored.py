"""One checkpoint on storage, and what can be wrong with its files."""

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
from fastckpt.errors import BadCheckpoint, PersistError

Read = TypeVar("Read")


@dataclass(frozen=True)
class Stored:
    """A checkpoint on storage, as its manifest tells.

    Attributes:
        manifest: What it consists of.
        place: The directory of its manifest.
        target: The file that the user named for `MODEL`, if any.
    """

    manifest: Manifest
    place: Path
    target: Path | None

    @property
    def id(self) -> SaveId:
        """What was saved."""
        return self.manifest.id

    @cached_property
    def missing(self) -> list[str]:
        """Files that a resume of as many ranks as saved would lack; empty for one that counts."""
        return missing_of(self.manifest)

    @property
    def path(self) -> Path:
        """What a user would call this checkpoint: the file that they named, while it is its own, else its directory."""
        return self.target if self.target and (self._is_at_target or self.owns_target()) else self.place

    def path_of(self, name: str) -> Path:
        """Where a file lies; raises BadCheckpoint if the manifest does not name it."""
        return self._locate(self.manifest.entry(name))

    def files(self) -> dict[str, Path]:
        """Where all files lie, by name."""
        return {entry.name: self._locate(entry) for entry in self.manifest.files}

    def check_sizes(self) -> None:
        """Raise BadCheckpoint if a file is missing or not as long as recorded."""
        for entry in self.manifest.files:
            path = self._locate(entry)
            found = check_size(entry, path)
            if entry.stamp and entry.stamp != (found.st_ino, found.st_mtime_ns):
                check_digest(entry, path, digest(path))  # a newer checkpoint may have taken over the path

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read the files, by default all; raise BadCheckpoint if one is not what was saved."""
        entries = self.manifest.files if names is None else [self.manifest.entry(name) for name in names]
        for entry in entries:
            path = self._locate(entry)
            check_size(entry, path)
            check_digest(entry, path, digest(path))

    def owns_target(self) -> bool:
        """Whether the file that the user named is this checkpoint's, and not what somebody has put there since."""
        try:
            entry = self.manifest.entry(MODEL)
            here, own = (self.target or self.place).stat(), self._locate(entry).stat()
        except (OSError, BadCheckpoint):
            return False
        if entry.stamp:
            return entry.stamp == (here.st_ino, here.st_mtime_ns)
        return os.path.samestat(here, own) or (here.st_size, here.st_mtime_ns) == (own.st_size, own.st_mtime_ns)

    @property
    def _is_at_target(self) -> bool:
        return any(entry.stamp for entry in self.manifest.files)

    def _locate(self, entry: FileEntry) -> Path:
        """Where a file is stored; a model with a stamp is of an earlier version, which wrote it to the target alone."""
        return self.target if self.target and entry.stamp else self.place / entry.name


def read_manifest(place: Path, name: str = NAME) -> Manifest | None:
    """The manifest in a directory, None if there is none.

    Raises BadCheckpoint if it cannot be read, PersistError if its file system does not answer now.
    """
    path = place / name

    def read() -> bytes:
        with open(path, "rb", opener=open_at_once) as file:
            return file.read(MAX_TEXT + 1)

    try:
        text = answered(path, read)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    try:
        return Manifest.from_json(text)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{path}: {error}") from error


def ours(place: Path) -> Manifest | None:
    """The manifest in a place, if there is one that can be read."""
    try:
        return read_manifest(place)
    except (BadCheckpoint, PersistError):
        return None


def answered(path: Path, read: Callable[[], Read]) -> Read:
    """Read a file; raises PersistError instead of an error that says nothing of it.

    Such a file is not damaged: it must not be quarantined, nor an older one take its place.
    """
    try:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        return read()  # another machine has replaced or removed what was open here: what is there now is another file
    except (OSError, MemoryError) as error:
        if verdict(error, Phase.READING) is not ReadVerdict.NO_ANSWER:
            raise
        text = error.strerror if isinstance(error, OSError) else "no memory"
        raise PersistError(f"{path} cannot be read now: {text}. {remedy(error)}") from error


def with_manifests(places: Iterable[Path]) -> list[Path]:
    """Those with what begins as a manifest of ours, damaged or not: others have files of this name, too."""
    found = []
    for place in places:

        def begins(path: Path = place / NAME) -> bool:
            with open(path, "rb", opener=open_at_once) as file:
                return b'"fastckpt"' in file.read(32)

        with suppress(OSError):
            if answered(place / NAME, begins):
                found.append(place)
    return found


def open_at_once(path: str, flags: int) -> int:
    """An opener of files; without O_NONBLOCK, a pipe would wait for a writer that never comes."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


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
    """Raise BadCheckpoint if what was read is not what was saved."""
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
