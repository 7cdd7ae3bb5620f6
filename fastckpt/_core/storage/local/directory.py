"""The durable tier of one checkpoint directory."""

import errno
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import Manifest
from fastckpt._core.io.copier import UNLIMITED, Copier
from fastckpt._core.io.durable import explained
from fastckpt._core.storage.history import DirectoryHistories
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local import part_files, removal
from fastckpt._core.storage.local.identity import DirectoryIdentity, KnownDirectory, identity, inode, mark
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.part_files import Contribution, PartFiles
from fastckpt._core.storage.local.publish import Publication
from fastckpt._core.storage.local.quarantine import quarantine
from fastckpt._core.storage.local.scan import CheckpointReader, Scan
from fastckpt._core.storage.local.stored import Stored, check_size, ours, read_manifest
from fastckpt._core.storage.share import Share, Unfinished
from fastckpt.errors import BadCheckpoint, ConfigError

__all__ = ["CheckpointDirectory", "Scan", "Stored"]


class CheckpointDirectory:
    """Publishes, finds, verifies and deletes the checkpoints of a directory.

    On storage::

        checkpoint-<step>/                      model.pt, rank_0.pt, ..., manifest.json
        latest_checkpointed_iteration.txt       the step published last, for other tools
        .fastckpt/quarantine-*                  bad checkpoints, with a why.txt; never loaded, swept or deleted
        .fastckpt/parts-*                       parts of a checkpoint that nodes of a job have written so far
        .fastckpt/history-<history>             the launch that has opened it: see `Record`
        .fastckpt/{tmp,retired,dropped,deleted}-*, writers, publisher

    The reader's rule. A checkpoint counts if its manifest is undamaged, is in the directory that belongs to its id, and
    names files that are all there in their recorded sizes. A ``retired-`` directory counts, too: it made way for a
    checkpoint that may not have come. Of several that were saved to one path that their user named the newest counts.
    The tracker is never read. Directories without a manifest of ours are not touched, except that one in the way of a
    checkpoint's name is renamed.

    Methods may be called by several threads and processes; but one process at a time should publish and delete.

    Attributes:
        read_back: True if `publish` reads back and compares its files before they count.
    """

    def __init__(self, path: str | Path, copier: Copier | None = None) -> None:
        self.path = Path(path).absolute()
        self.read_back = False
        self._copier = copier or UNLIMITED
        self._layout = Layout(self.path)
        self._reader = CheckpointReader(self._layout)

    @cached_property
    def histories(self) -> DirectoryHistories:
        """Records of the launches that have opened histories here."""
        return DirectoryHistories(self._layout)

    def publish(self, request: PublishRequest) -> Manifest:
        """Copy images to storage as one checkpoint; it is durable when this returns.

        It takes the place of a checkpoint of the same step, or of the same ``target``. The images must not change
        meanwhile.

        Raises:
            PersistError: Storage refused, for example because it is full. Older checkpoints are as they were and
                nothing of this one is left; or it was complete, but could not be made durable.
            ConfigError: The target is part of another checkpoint.
            BadSource: The size or digest of an image differs from the known one.
            BadCheckpoint: No manifest can hold the request, for example for a name with ``..``.
        """
        with self._explained(request):
            request = request.at(self._layout.own(request.target, request.id))
            with self._layout.writing():
                return Publication(self._layout, request, self._copier, self._reader, read_back=self.read_back).run()

    def contribute(self, request: PublishRequest, share: Share) -> Contribution:
        """Copy one node's images to storage, as its part of a checkpoint of several nodes, durably.

        It counts when the parts of all nodes are there and `Contribution.complete` has been called by one of them
        since. The errors are those of `publish`; the target is in the share. If the part is there already, nothing is
        copied.
        """
        with self._explained(request):
            share = replace(share, target=self._layout.own(share.target, request.id))
            own = PartFiles(self._layout, request.id, share, self._reader)
            request = request.at("")
            with self._layout.writing():
                own.contribute(request, self._copier, read_back=self.read_back)
        return Contribution(self._layout, own)

    def _explained(self, request: PublishRequest) -> AbstractContextManager[None]:
        return explained(f"persist {request.id}", self.path, [each.path for each in request.sources.values()])

    def settle(self) -> list[Manifest | Unfinished]:
        """Publish checkpoints that nodes have written whole but not published, if they are newer than all that count.

        Returns the new checkpoints, and those that lack parts. Where there are no locks, the first node calls it.
        """
        with explained("publish what nodes have written", self.path):
            return list(part_files.settle(self._layout, self._reader))

    def scan(self) -> Scan:
        """All checkpoints, and damaged places, in one reading."""
        with explained("read checkpoints", self.path):
            return self._reader.scan()

    def checkpoints(self) -> list[Stored]:
        """All whole checkpoints, newest id first."""
        return self.scan().whole

    def known(self) -> list[Stored]:
        """The same, by one listing: most of them are not looked at again."""
        with explained("read checkpoints", self.path):
            return self._reader.known().whole

    def is_whole(self, stored: Stored) -> bool:
        """Return whether a checkpoint that is known is still there with all its files."""
        with explained("read checkpoints", self.path):
            return self._reader.is_whole(stored)

    def manifest(self, place: Path) -> Manifest:
        """The manifest in a place; raises BadCheckpoint if there is none, or it is damaged."""
        if (found := read_manifest(place)) is None:
            raise BadCheckpoint(f"{place} has no manifest; the first rank has found one there")
        return found

    def stored(self, manifest: Manifest, place: Path, target: Path | None) -> Stored:
        """The checkpoint of a manifest that was read, in that place."""
        return Stored(manifest, place, target)

    def verify(self, stored: Stored, names: Iterable[str] | None = None) -> None:
        """Read files of a checkpoint, by default all.

        Raises BadCheckpoint with file, expected and found size or digest if one is damaged.
        """
        stored.verify(names)

    def files(self, stored: Stored, into: Path) -> dict[str, Path]:
        """Return the paths at which the files of a checkpoint can be read.

        They are in the directory itself, so nothing goes ``into`` the other one.
        """
        return stored.files()

    def fetch(self, stored: Stored, names: Iterable[str], into: Path, *, digests: bool = True) -> None:
        """Compare files of a checkpoint with its manifest, by their digests or by their sizes alone."""
        for name in names:
            if digests:
                self.verify(stored, [name])
            else:
                check_size(stored.manifest.entry(name), stored.path_of(name))

    def identity(self) -> DirectoryIdentity:
        """Return the identity of this directory: its mark is gone when the directory is. Raises PersistError."""
        with explained("read the mark", self.path):
            return DirectoryIdentity(identity(self.path), inode(self.path))

    def mark(self, claim: str) -> str:
        """Mark this directory with ``claim``, unless it has a mark; which it has then, "" if none can be written."""
        with explained("read the mark", self.path):
            return mark(self.path, claim)

    def know(self, mark: str) -> None:
        """Write from now on only while this is the directory that has this mark now; raises PersistError."""
        with explained("read the mark", self.path):
            self._layout.known = KnownDirectory.of(self.path, mark) if mark else None

    def close(self) -> None:
        """Do nothing: nothing is held between two calls."""

    def delete(self, id: SaveId) -> None:
        """Remove a checkpoint, wherever it was saved to; nothing happens if there is none of that id.

        Raises:
            ConfigError: It is the newest whole one.
            PersistError: Storage refused.
        """
        with explained(f"delete {id}", self.path):
            if not self.path.is_dir():
                return
            with self._layout.writing():
                scan = self._reader.known()
                if not any(stored.id > id for stored in scan.whole[:1]) or all(each.id != id for each in scan.places):
                    scan = self.scan()  # a refusal, or an id that is not found, needs a fresh look
                if scan.whole and scan.whole[0].id == id:
                    raise ConfigError(
                        f"cannot delete {id} in {self.path}: it is the newest of {len(scan.whole)} whole checkpoints, "
                        "which is always kept. Save a newer one first."
                    )
                for stored in scan.places:
                    if stored.id == id:
                        removal.delete(self._layout, stored, lambda: self._has_newer(id, scan.whole[:1]))

    def _has_newer(self, id: SaveId, known: list[Stored]) -> bool:
        """Return whether a newer checkpoint counts: the one that is known, or another that has come since."""
        if all(ours(newest.place) == newest.manifest for newest in known):
            return True  # or there was none, and nothing depends on the deleted one
        return any(newer.id > id for newer in self.scan().whole)

    def quarantine(self, bad: Stored | Path, why: str) -> Path:
        """Quarantine a bad checkpoint: we never load or delete it; returns where it is now.

        A file that its user named stays where it is.

        Args:
            bad: A checkpoint, or a path in `Scan.damaged`.
            why: Its fault; kept beside it in ``why.txt``.

        Raises PersistError if storage refuses, or if it is not there any more, or not bad any more.
        """
        with explained(f"quarantine {bad.id if isinstance(bad, Stored) else bad}", self.path), self._layout.writing():
            place = self._reader.place_of(bad)
            if place is None:
                path = bad.path if isinstance(bad, Stored) else bad
                raise FileNotFoundError(errno.ENOENT, "another checkpoint took its place", str(path))
            return quarantine(self._layout, place, why)

    def sweep(self) -> list[Path]:
        """Remove or restore files that crashed writers left; does nothing while anybody writes here.

        A file system without locks cannot show who writes: there only drafts that are an hour old are removed.

        Returns the paths that were removed or restored. Raises PersistError if storage refuses.
        """
        with explained("sweep", self.path), self._layout.alone() as alone:
            if not alone:
                return [] if self._layout.has_locks() else removal.sweep_abandoned(self._layout, self._reader)
            done = [*removal.sweep(self._layout, self._reader), *part_files.sweep(self._layout, self._reader)]
            scan = self.scan()
            needed = {stored.id.history for stored in scan.places} | {id.history for id in scan.gathered}
            return done + [self._layout.private / name for name in self.histories.forget(needed)]
