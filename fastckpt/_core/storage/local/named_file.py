"""The file at the path that a user named for a checkpoint's model: a hard link to it, or a copy where none can be."""

import errno
import hashlib
import os
import stat
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MODEL, NAME, file_named
from fastckpt._core.io.direct import copy_file
from fastckpt._core.io.directory_root import WITHOUT_LINKS, DirectoryRoot
from fastckpt._core.io.durable import make_directories
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.stored import Stored, is_copy, ours
from fastckpt.errors import ConfigError

PREFIX = ".fastckpt-"


class NamedFile:
    """Made only by a process that saves to that path: a path that was read from the directory is not acted on.

    A crash before `put` leaves the path as it was. A file outside the checkpoint directory is its user's, and is never
    removed.

    Args:
        layout: The checkpoint directory.
        target: Path that the user named, as a manifest has it, checked by `Layout.own`.
    """

    def __init__(self, layout: Layout, target: str) -> None:
        self.path = layout.root / target
        self._layout = layout
        self._is_within = self.path.is_relative_to(layout.root)
        self._files = layout.files if self._is_within else DirectoryRoot(self.path.parent)
        self._draft: Path | None = None

    def prepare(self, model: Path) -> None:
        """Have the model where one rename makes it the file; raises OSError if that could not replace it."""
        if self._is_within:
            self._files.make_directory(self.path.parent, parents=True, durable=True)
        else:
            make_directories(self.path.parent)
        if self._files.is_directory(self.path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path))
        self._draft = self._draft_path()
        _link(self._layout.files, model, self._draft, self._files)

    def _draft_path(self) -> Path:
        """Return the path of the draft: where a sweep finds the rest of a crash, or else beside the file.

        A draft left beside the file is overwritten by the next save.
        """
        own, there = self._layout.files.lstat(self._layout.private), self._files.lstat(self.path.parent)
        if self._is_within and own and there and own.st_dev == there.st_dev:
            return self._layout.draft("tmp")
        return self.path.with_name(PREFIX + hashlib.blake2b(os.fsencode(self.path.name), digest_size=6).hexdigest())

    def put(self) -> None:
        """Give the prepared file its name."""
        if self._draft:
            self._files.move(self._draft, self.path)
            self._files.unlink(self._draft)  # rename(2) does nothing if both are links to one file already

    def put_of(self, model: Path) -> None:
        """Have the path name the model of a checkpoint that counts, durably, be it that another node has put it."""
        if _has_model(self._files, self.path, self._layout.files, model):
            self._files.sync(self.path.parent)
        else:
            self.prepare(model)
            self.put()

    def withdraw(self) -> None:
        """Remove the prepared file, if it has not got its name."""
        if self._draft and self._files.exists(self._draft):
            self._files.remove(self._draft)
            self._files.sync(self._draft.parent)


def named_file(layout: Layout, id: SaveId, target: str) -> NamedFile | None:
    """The file that the user named, if they did, outside the checkpoint; ``target`` is as a manifest has it."""
    return NamedFile(layout, target) if file_named(target) and not layout.name_within(id, target) else None


def _has_model(files: DirectoryRoot, path: Path, source: DirectoryRoot, model: Path) -> bool:
    """Return whether a path still names a checkpoint's model, or a copy of it, and no other file is there."""
    here, own = files.lstat(path), source.lstat(model)
    return here is not None and own is not None and stat.S_ISREG(here.st_mode) and is_copy(here, own)


def remove_named(layout: Layout, stored: Stored) -> None:
    """Remove the file that a user named, where it is in the checkpoint directory and the checkpoint's own, durably.

    Raises OSError if it stays: then the checkpoint must not be forgotten.
    """
    path = stored.target
    if not path or not path.is_relative_to(layout.root):
        return
    if _has_model(layout.files, path, layout.files, stored.place / MODEL):
        layout.files.unlink(path)
    if layout.files.is_directory(path.parent):
        layout.files.sync(path.parent)  # a dead writer may have removed it, but not durably


def link_within(layout: Layout, place: Path, name: str) -> None:
    """Give the model in a place one more name there, durably; raises ConfigError if another file has that name."""
    manifest = ours(place)
    if name == NAME or (manifest and name in {entry.name for entry in manifest.files}):
        raise ConfigError(f"cannot save the model to {name} of the checkpoint's own directory: that is another file")
    layout.files.make_directory((place / name).parent, parents=True, durable=True)
    _link(layout.files, place / MODEL, place / name, layout.files)
    layout.files.sync((place / name).parent)


def _link(source: DirectoryRoot, model: Path, path: Path, files: DirectoryRoot) -> None:
    files.unlink(path)
    try:
        source.link(model, path, into=files)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        _copy(source, model, path, files)


def _copy(source: DirectoryRoot, model: Path, path: Path, files: DirectoryRoot) -> None:
    try:
        copy_file(model, path, files=files)
    except OSError as error:
        error.filename = error.filename or str(path)  # another file system than the checkpoint's may be full
        raise
    times, copy = source.lstat(model), files.open(path, os.O_WRONLY)
    try:
        if times:
            os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))  # by which `is_copy` knows it
    finally:
        os.close(copy)
