"""Checkpoints that were found in one directory, so that a look at many of them reads only new manifests."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from fastckpt._core.format.manifest import NAME
from fastckpt._core.storage.local.stored import Stored

MOST_FILES = 200_000
"""Number of files of all checkpoints that are kept here: 1,000 checkpoints of 100 ranks with two files each."""


class _Known(NamedTuple):
    stamp: object
    inode: int
    stored: Stored


class KnownCheckpoints:
    """Checkpoints by place. A later one of another process there has another stamp, or is another directory.

    Args:
        read: Reads the manifest in a place; None if there is none.
    """

    def __init__(self, read: Callable[[Path], Stored | None]) -> None:
        self._read = read
        self._known: dict[Path, _Known] = {}
        self._whole = set[Path]()
        self._files = 0
        self._lock = threading.Lock()  # an upload may look while a persist does

    def read(self, place: Path, inode: int) -> Stored | None:
        """The checkpoint in a directory of that inode; its manifest is not read again while it is the same file."""
        stamp = stamp_of(place)  # before it is read: a later manifest has another
        known = self._known.get(place)
        if known is not None and stamp is not None and known.stamp == stamp:
            if known.inode != inode:
                self._keep(place, known._replace(inode=inode))
            return known.stored
        with self._lock:
            self._drop(place)
        stored = self._read(place)
        if stored is not None:
            self._keep(place, _Known(stamp, inode, stored))
        return stored

    def same(self, place: Path, inode: int) -> Stored | None:
        """Return the checkpoint found in a place before, if the directory is the same; the file system is not asked."""
        known = self._known.get(place)
        return known.stored if known and inode and known.inode == inode else None

    def inode_of(self, place: Path) -> int:
        """Return the inode of the directory in which a checkpoint was found; 0 if it is not known."""
        known = self._known.get(place)
        return known.inode if known else 0

    def whole(self, place: Path, inode: int) -> Stored | None:
        """Return the checkpoint that was whole in a place at the last look, if the directory is the same.

        The file system is not asked.
        """
        return self.same(place, inode) if place in self._whole else None

    def judge(self, place: Path, *, is_whole: bool) -> None:
        """Note whether all files of a checkpoint were there."""
        with self._lock:
            (self._whole.add if is_whole and place in self._known else self._whole.discard)(place)

    def forget_others(self, places: Collection[Path]) -> None:
        """Forget all places but these."""
        with self._lock:
            for place in self._known.keys() - places:
                self._drop(place)

    def _keep(self, place: Path, known: _Known) -> None:
        with self._lock:
            self._drop(place)
            count = len(known.stored.manifest.files)
            if self._files + count <= MOST_FILES:
                self._known[place] = known
                self._files += count

    def _drop(self, place: Path) -> None:
        self._whole.discard(place)
        if place in self._known:
            self._files -= len(self._known.pop(place).stored.manifest.files)


def stamp_of(place: Path) -> object:
    """Distinguishes the manifest in a place from any other; None if there is none."""
    try:
        found = (place / NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns
