"""The durable tier at a URL: checkpoints as objects of a store that fsspec opens, such as ``s3://bucket/run1``."""

import errno
import logging
import secrets
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MODEL, NAME, FileEntry, Manifest
from fastckpt._core.io.copier import Copier
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.identity import DirectoryIdentity, parsed
from fastckpt._core.storage.local.layout import PRIVATE, TRACKER
from fastckpt._core.storage.local.quarantine import WHY
from fastckpt._core.storage.remote.catalog import (
    Catalog,
    RemoteCheckpoint,
    RemoteScan,
    id_of,
    is_ours,
    is_place,
    is_shared,
    new_place,
)
from fastckpt._core.storage.remote.client_errors import ExplainedErrors, LoggedErrors
from fastckpt._core.storage.remote.download import download, room_for
from fastckpt._core.storage.remote.object_history import ObjectHistories
from fastckpt._core.storage.remote.objects import Objects
from fastckpt._core.storage.remote.part_objects import PartObjects, RemoteContribution, share_in
from fastckpt._core.storage.remote.upload import check_complete, upload_images
from fastckpt._core.storage.share import Share, Unfinished
from fastckpt.errors import ConfigError, FastckptError

logger = logging.getLogger("fastckpt")

ABANDONED = 24 * 3600.0
"""Seconds after which another host's place without a manifest counts as abandoned."""
_IDENTITY = f"{PRIVATE}/identity"


class RemoteStore:
    """Publishes, finds, verifies and deletes checkpoints at a URL.

    In the store::

        checkpoint-<step>/<history>-<host>-<attempt>/   model.pt, rank_0.pt, ..., manifest.json; of several nodes, also
                                                        the part-<node>.json that it was made of
        latest_checkpointed_iteration.txt               the step published last, for other tools
        .fastckpt/history-<history>                     the launch that has opened it: see `Record`
        .fastckpt/identity                              distinguishes this store from a later one at its URL

    The reader's rule. A checkpoint counts if its manifest is there and undamaged, is in a place of its id, and names
    objects that are all there in their recorded sizes. A ``why.txt`` in the place means quarantine: it does not count.
    Each attempt to publish has a place of its own, so nothing is ever overwritten that a manifest names. The manifest
    is written last, and a reader finds the old or the new checkpoint whole. A file that a user named is a copy that
    the store makes of the model; nothing is read from it.

    It is assumed that the store is strongly consistent, as S3, GCS, Azure and HDFS are: written objects are listed
    and read at once. Methods may be called by several threads and processes; but one process at a time should publish
    and delete.

    Attributes:
        read_back: True if `publish` reads its uploads again, and compares them, before they count.
    """

    def __init__(self, url: str, copier: Copier | None = None) -> None:
        """Raise ConfigError if nothing that is installed opens such a URL."""
        self._objects = Objects(url)
        self._copier = copier or Copier()
        self._catalog = Catalog(self._objects)
        self.histories = ObjectHistories(self._objects)
        self._known: list[RemoteCheckpoint] | None = None
        self.path = self._objects.url()
        self.read_back = False

    def publish(self, request: PublishRequest) -> Manifest:
        """Upload images as one checkpoint; it is durable when this returns.

        It takes the place of older checkpoints of the same step. The images must not change meanwhile. The target is
        where the user wants a copy of ``model.pt``: a URL of this protocol, or relative to this store's.

        Raises:
            PersistError: The store refused, or could not be reached for longer than its client tries. Older
                checkpoints are as they were; nothing of this one counts, and a sweep removes the rest of it.
            ConfigError: The target is not in such a store, or part of a checkpoint.
            BadSource: The size or digest of an image differs from the known one.
            BadCheckpoint: No manifest can hold the request, for example for a name with ``..``.
        """
        with ExplainedErrors(f"persist {request.id}", self.path):
            # 1. upload into a place of its own   2. compare the sizes that the store
            # lists   3. the user's copy   4. the manifest, which commits   5. the
            # tracker, and removal of replaced checkpoints: failures there are logged
            request = request.at(_own(self._objects, request.target))
            place = new_place(request.id)
            with ExitStack() as on_failure:
                left = f"remove what is left of {self._objects.url(place)}"
                on_failure.callback(self._objects.later, left, lambda: self._remove(place))
                files = upload_images(self._objects, self._copier, request, place, read_back=self.read_back)
                manifest = request.manifest(files)
                check_complete(self._objects, manifest, place)
                if request.target:
                    self._objects.copy(f"{place}/{MODEL}", request.target)
                with metrics.phase("persist.manifest", step=request.id.step):
                    self._objects.put(f"{place}/{NAME}", manifest.to_json().encode())
                on_failure.pop_all()
            self._finish(manifest, place)
        return manifest

    def contribute(self, request: PublishRequest, share: Share) -> RemoteContribution:
        """Upload one node's images, as its part of a checkpoint of several; see `CheckpointDirectory.contribute`."""
        self._known = None  # other nodes may publish it
        with ExplainedErrors(f"persist {request.id}", self.path):
            share = replace(share, target=_own(self._objects, share.target))
            gathering = PartObjects(self._objects, self._catalog, request.id, share)
            gathering.contribute(request.at(""), self._copier, read_back=self.read_back)
        return RemoteContribution(self.path, gathering, self._finish)

    def _finish(self, manifest: Manifest, place: str) -> None:
        """Do the work that should follow, but does not change which checkpoint counts as the newest."""
        with metrics.phase("persist.tracker", step=manifest.id.step), LoggedErrors(f"write {TRACKER} in {self.path}"):
            self._objects.put(TRACKER, str(manifest.id.step).encode())
        with metrics.phase("persist.drop", step=manifest.id.step), LoggedErrors("remove what was replaced"):
            there = self._catalog.of_step(manifest.id.step)
            replaced = there.replaced(manifest, place)
            if self._known is not None:
                others = [stored for stored in self._known if stored.id.step != manifest.id.step]
                self._known = others + [stored for stored in there.places if stored.name not in replaced]
            for old in replaced:
                self._remove(old)

    def settle(self) -> list[Manifest | Unfinished]:
        """Publish checkpoints that nodes have written whole but not published, if they are newer than all that count.

        Returns the new checkpoints, and those that lack parts.
        """
        with ExplainedErrors("publish what nodes have written", self.path):
            scan = self._catalog.scan()
            newest = max((stored.id for stored in scan.places), default=None)
            places = {place: id for place, _ in scan.unfinished if is_shared(place) and (id := id_of(place))}
            newer = {place: id for place, id in places.items() if newest is None or id > newest}
            return [each for place, id in newer.items() if (each := self._settle(place, id))]

    def _settle(self, place: str, id: SaveId) -> Manifest | Unfinished | None:
        try:
            share = share_in(self._objects, place)
            return PartObjects(self._objects, self._catalog, id, share).settle(self._finish) if share else None
        except FastckptError as error:
            # A candidate less, not an error: an older checkpoint can be resumed, and a warning names this one.
            return Unfinished(id, f"it cannot be published: {error}")

    def scan(self) -> RemoteScan:
        """All checkpoints, and damaged places, in one reading; raises PersistError if the store does not answer."""
        with ExplainedErrors("read checkpoints", self.path):
            scan = self._catalog.scan()
        self._known = list(scan.places)
        return scan

    def checkpoints(self) -> list[RemoteCheckpoint]:
        """All whole checkpoints, newest id first."""
        return self.scan().whole

    def known(self) -> list[RemoteCheckpoint]:
        """Return the `checkpoints` as found there last, with those published and deleted here since: no requests."""
        if self._known is None:
            return self.checkpoints()
        return RemoteScan(sorted(self._known, key=lambda stored: (stored.id, stored.manifest.time), reverse=True)).whole

    def is_whole(self, stored: RemoteCheckpoint) -> bool:
        """True: to ask for all files of each would cost more requests than a persist."""
        return True

    def manifest(self, place: str) -> Manifest:
        """The manifest at a URL; raises BadCheckpoint or PersistError."""
        with ExplainedErrors(f"read {NAME}", place):
            return self._catalog.manifest(self._objects.name(place))

    def stored(self, manifest: Manifest, place: str, target: str | None) -> RemoteCheckpoint:
        """The checkpoint of a manifest that was read, at that URL."""
        return RemoteCheckpoint(manifest, self._objects.name(place), place, target)

    def verify(self, stored: RemoteCheckpoint, names: Iterable[str] | None = None) -> None:
        """Read files of a checkpoint, by default all.

        Raises:
            BadCheckpoint: One is damaged; the message names it, and the found size or digest.
            PersistError: The store does not answer.
        """
        for entry in _entries(stored, names):
            with ExplainedErrors(f"read {entry.name} of {stored.id}", self.path):
                download(self._objects, stored.object(entry.name), entry, None)

    def files(self, stored: RemoteCheckpoint, into: Path) -> dict[str, Path]:
        """Return the paths of a checkpoint's files once they are fetched."""
        return {entry.name: into / entry.name for entry in stored.manifest.files}

    def fetch(self, stored: RemoteCheckpoint, names: Iterable[str], into: Path, *, digests: bool = True) -> None:
        """Download files of a checkpoint into a directory, comparing their digests on the way in any case.

        Each takes its name when it is whole. Raises as `verify`; a PersistError, too, if the directory cannot take it.
        """
        for entry in _entries(stored, names):
            path = into / entry.name
            # Renamed when complete: other local ranks look for the final name, and must not read half a file.
            draft = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
            with ExplainedErrors(f"read {entry.name} of {stored.id}", self.path), ExitStack() as on_exit:
                on_exit.callback(draft.unlink, missing_ok=True)
                with room_for(entry, path.parent):
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    file = on_exit.enter_context(draft.open("wb", buffering=0))
                download(self._objects, stored.object(entry.name), entry, file)
                with room_for(entry, path.parent):
                    draft.rename(path)

    def delete(self, id: SaveId) -> None:
        """Remove a checkpoint, and the copy that its user named; nothing happens if there is none of that id.

        Raises:
            ConfigError: It is the newest whole one.
            PersistError: The store refused.
        """
        # 1. never the newest whole one, by a fresh listing if that is not certain   2. the user's copy, if it is this
        # checkpoint's   3. the manifest, then the rest
        with ExplainedErrors(f"delete {id}", self.path):
            # No listing for each deletion: retention may delete many in a row. One look at the newer one that makes
            # this one obsolete is enough.
            whole = self.known()
            if not (whole and whole[0].id > id and self._counts(whole[0])):
                whole = self.checkpoints()
            if whole and whole[0].id == id:
                raise ConfigError(
                    f"cannot delete {id} in {self.path}: it is the newest of {len(whole)} whole checkpoints, which is "
                    "always kept. Save a newer one first."
                )
            among = self._known or []
            for stored in [stored for stored in self._catalog.of_step(id.step).places if stored.id == id]:
                self._remove_copy(stored, among)
                self._remove(stored.name)
            self._known = [stored for stored in among if stored.id != id]

    def _counts(self, stored: RemoteCheckpoint) -> bool:
        """Return whether a checkpoint is still there."""
        return any(found.id == stored.id for found in self._catalog.of_step(stored.id.step).whole)

    def _remove_copy(self, stored: RemoteCheckpoint, among: list[RemoteCheckpoint]) -> None:
        """Remove the file that a user named in this store, if it is this checkpoint's: the newest saved there owns it.

        A file elsewhere is the user's: no object's content is a reason to remove it.
        """
        target = stored.manifest.target
        is_here = target and not target.startswith("/") and not _is_part_of_checkpoint(target)
        if is_here and max(other.id for other in [stored, *among] if other.manifest.target == target) == stored.id:
            self._objects.remove(target)

    def _remove(self, place: str) -> None:
        """Remove a place; first it ceases to count."""
        # The manifest first: if this process dies now, the rest does not count, and a sweep removes it.
        self._objects.remove(f"{place}/{NAME}")
        self._objects.remove_all(place)
        self._catalog.forget(place)

    def quarantine(self, bad: RemoteCheckpoint | str, why: str) -> str:
        """Quarantine a checkpoint, or a URL in `RemoteScan.damaged`: we never load or delete it.

        It stays at its URL, which is returned; ``why.txt`` gives the reason. Raises PersistError if it is not there any
        more.
        """
        url, self._known = bad if isinstance(bad, str) else bad.place, None
        with ExplainedErrors(f"quarantine {url}", self.path):
            place = self._objects.name(url)
            if NAME not in self._objects.sizes(place):
                raise FileNotFoundError(f"{url} is not there any more")
            # Not moved: a store has no rename, and a copy of damaged bytes would cost as much as the checkpoint.
            self._objects.put(f"{place}/{WHY}", _reason(why).encode())
        return url

    def sweep(self) -> list[str]:
        """Remove remains of dead writers: those of this host at once, others after a day.

        Call while no other process of this host publishes. Returns the removed URLs.
        """
        # 1. uploads that dead writers left under way   2. places without
        # a manifest   3. records of histories that decide nothing
        with ExplainedErrors("sweep", self.path):
            removed = self._objects.abort_uploads(_is_abandoned)
            found = self._catalog.scan()
            for place, object in found.unfinished:
                # An unfinished place of another host may be an upload under way: only its age shows that.
                if is_ours(place) or _is_abandoned(place, self._objects.written_at(object)):
                    self._objects.remove_all(place)
                    removed.append(place)
            histories = {id.history for id in [*(stored.id for stored in found.places), *found.gathered]}
            removed += self.histories.forget(histories)
        return [self._objects.url(name) for name in removed]

    def identity(self) -> DirectoryIdentity:
        """Return the identity of this store: its mark is gone when its objects are. Raises PersistError."""
        with ExplainedErrors("read the mark", self.path):
            return DirectoryIdentity(parsed(self._read_mark().decode(errors="replace")))

    def _read_mark(self) -> bytes:
        try:
            return self._objects.read(_IDENTITY, 64) or b""
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return b""  # an empty object has no first bytes: S3 raises that

    def mark(self, claim: str) -> str:
        """Mark this store with ``claim``, unless it has a mark; which it has then.

        To be called by one node of a job alone: of several who do so at once, the last wins, and the others may have
        seen their own. Raises PersistError if the store does not answer, or cannot be written to.
        """
        with ExplainedErrors("mark", self.path):
            if not self.identity().mark:
                self._objects.put(_IDENTITY, claim.encode())
            # Read back: of two nodes that wrote at once, both then go by the last one's.
            return self.identity().mark

    def know(self, mark: str) -> None:
        """Do nothing: no mount stands between this process and a store."""

    def close(self) -> None:
        """End the threads and the connections."""
        self._objects.close()


def _is_abandoned(name: str, written: float) -> bool:
    return is_place(name) and (is_ours(name) or time.time() - written > ABANDONED)


def _reason(why: str) -> str:
    return (
        f"when: {datetime.now(UTC).isoformat(timespec='seconds')}\nwhy: {' '.join(why.split())}\n"
        f"If it can be repaired, remove this {WHY}; else remove all that is here.\n"
    )


def _entries(stored: RemoteCheckpoint, names: Iterable[str] | None) -> list[FileEntry]:
    manifest = stored.manifest
    return list(manifest.files) if names is None else [manifest.entry(name) for name in names]


def _own(objects: Objects, target: str) -> str:
    """A user's path as a manifest's ``target``; raises ConfigError for one where no copy can be made."""
    if not target:
        return ""
    name = objects.name(target) if "://" in target else target
    if _is_part_of_checkpoint(name):
        raise ConfigError(f"cannot save to {target}: it is part of a checkpoint. Choose another path.")
    return name


def _is_part_of_checkpoint(name: str) -> bool:
    return is_place(name) or name == TRACKER or name.split("/", maxsplit=1)[0] == PRIVATE
