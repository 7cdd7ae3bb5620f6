"""The file at the path that a user named for a checkpoint's model: a hard link to it, or a copy where none can be."""

import errno
import hashlib
import logging
import os
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MODEL, NAME, file_named
from fastckpt._core.io.direct import copy_file
from fastckpt._core.io.durable import make_directories, move, remove, sync_directory
from fastckpt._core.storage.local.layout import FILES, Layout
from fastckpt._core.storage.local.stored import ours
from fastckpt.errors import ConfigError

logger = logging.getLogger(__name__)

WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of file systems that have no hard links, or none between these two places."""
PREFIX = ".fastckpt-"


class NamedFile:
    """Published beside its name before the checkpoint is committed, and renamed after: the draft says that it is due.

    Attributes:
        path: What the user named.
        draft: The link until it gets that name; it follows from the manifest, so that any process finds it.
    """

    def __init__(self, root: Path, id: SaveId, target: str) -> None:
        self.path = root / target
        text = f"{id.history}-{id.step}-{target}".encode("utf-8", "surrogateescape")
        self.draft = self.path.with_name(PREFIX + hashlib.blake2b(text, digest_size=6).hexdigest())

    @property
    def is_due(self) -> bool:
        """Whether the file does not have its name yet."""
        return self.draft.exists()

    def prepare(self, model: Path) -> None:
        """Link the model beside the path, durably; raises OSError if it could not replace what is there."""
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path))
        make_directories(self.path.parent)
        _link(model, self.draft)

    def put(self) -> None:
        """Give the file its name, if that is due."""
        if self.is_due:
            move(self.draft, self.path)
            self.draft.unlink(missing_ok=True)  # rename(2) does nothing if both are links to one file already

    def withdraw(self) -> None:
        """Remove the file if it does not have its name yet."""
        if self.is_due:
            remove(self.draft)
            sync_directory(self.draft.parent)


def named_file(layout: Layout, id: SaveId, target: str) -> NamedFile | None:
    """The file that the user named, if they did, outside the checkpoint; ``target`` is as a manifest has it."""
    return NamedFile(layout.root, id, target) if file_named(target) and not layout.name_within(id, target) else None


def link_within(place: Path, name: str) -> None:
    """Give the model in a place one more name there, durably; raises ConfigError if another file has that name."""
    manifest = ours(place)
    if name == NAME or (manifest and name in {entry.name for entry in manifest.files}):
        raise ConfigError(f"cannot save the model to {name} of the checkpoint's own directory: that is another file")
    make_directories((place / name).parent)
    _link(place / MODEL, place / name)


def _link(model: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        os.link(model, path)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        _copy(model, path)
        times = model.stat()
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # by which `Stored.owns_target` knows it
    sync_directory(path.parent)


def _copy(model: Path, path: Path) -> None:
    try:
        copy_file(model, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # another file system than the checkpoint's may be full
        raise


def remove_with_draft(layout: Layout, place: Path) -> None:
    """Remove a place that does not count, and the user's file that is due for it."""
    for manifest in filter(None, map(ours, (place, place / FILES))):
        if named := named_file(layout, manifest.id, manifest.target):
            named.withdraw()
            if named.is_due:
                return  # only the place tells of it
    remove(place)


def finish_of_earlier_versions(layout: Layout) -> None:
    """Put or remove the drafts of files of users that an earlier version left when it died."""
    for place in layout.drafts("checkpoint") + layout.drafts("tmp"):
        try:
            draft = Path((place / "draft").read_text("utf-8", "surrogateescape"))
            if not draft.name.startswith(PREFIX) or not draft.is_file():
                continue
            manifest = ours(place) if layout.is_record(place) else None
            if manifest and (path := layout.file_of(manifest)):
                sync_directory(layout.private)  # the writer may have died before: the file must not outlive its record
                move(draft, path)
            else:
                draft.unlink()
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                logger.warning("cannot finish %s, which an earlier version left: %s", place, error)
