"""Durable tiers: the checkpoint directory, and a remote copy of it."""

import logging
import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import Manifest
from fastckpt._core.policy.resume import CheckpointLocation
from fastckpt._core.resume.stored_entries import StoredEntry
from fastckpt._core.resume.tiers import Candidate, Candidates, Faults, Listing, Rejected, RejectionKind, attempt_of
from fastckpt._core.storage.download_dir import make_staging, remove_staging, staging_path
from fastckpt._core.storage.local.stored import read_manifest
from fastckpt._core.storage.share import Unfinished
from fastckpt._core.storage.store import Store, StoredCheckpoint, is_url, open_store
from fastckpt.errors import BadCheckpoint, FastckptError, PersistError

logger = logging.getLogger("fastckpt")


class StorageTier:
    """A durable tier: a path, or the URL of a store, whose files are downloaded to a disk of this node.

    Attributes:
        is_far: True if it is a store that is reached over a network.
        has_quarantined: True if something was rejected and the saver does not know of it yet.
    """

    def __init__(self, name: str, location: str, client: SaverClient, *, digests: bool) -> None:
        self.name, self.location, self.is_far = name, location, is_url(location)
        self.has_quarantined = self._is_unpublished = False
        self._client, self._digests = client, digests
        self._staging = staging_path(client.arena)
        self._scanned: dict[str, StoredCheckpoint] = {}

    @cached_property
    def _store(self) -> Store:
        return open_store(self.location)  # not before it is needed: memory may be enough, and clients are slow to start

    def list(self) -> Listing:
        """List whole checkpoints, damaged ones and those that were quarantined; the first rank calls it."""
        scan, kinds, candidates = self._store.scan(), RejectionKind, Candidates()
        rejected = [Rejected(kinds.DAMAGED, place, why, self) for place, why in scan.damaged]
        rejected += [Rejected(kinds.QUARANTINED, place, why) for place, why in scan.quarantined]
        places = defaultdict[SaveId, list[StoredCheckpoint]](list)
        for stored in scan.places:
            places[stored.manifest.id].append(stored)
            self._scanned[str(stored.place)] = stored
        for save, (stored, *others) in places.items():
            names = frozenset(str(each.place).rpartition("/")[2] for each in (stored, *others))
            location = CheckpointLocation(*save, self.name, 0, attempt_of(stored.manifest.details, self._client.place))
            candidates[location] = self.candidate(stored, names)
        newest = max((stored.id for stored in scan.whole), default=None) if scan.gathered else None
        self._is_unpublished = any(newest is None or id > newest for id in scan.gathered)
        return Listing(candidates, rejected)

    def candidate(self, stored: StoredCheckpoint, names: frozenset[str] = frozenset()) -> Candidate:
        """The candidate for one of its checkpoints."""
        manifest, files = stored.manifest, self._store.files(stored, self._downloads(stored.id))
        return Candidate(self, files, dict(manifest.details), manifest.world_size, stored, names)

    def open(self, candidate: Candidate) -> Candidate:
        """The candidate with its files, by its manifest, which the first rank of a node reads for the others.

        Raises BadCheckpoint or PersistError if it cannot be read.
        """
        entry = candidate.record
        if not isinstance(entry, StoredEntry):
            return candidate
        stored = self._scanned.get(str(entry.place))
        if stored is None or stored.id != entry.id:
            manifest = self._shared(entry) or self._store.manifest(entry.place)
            stored = self._store.stored(manifest, entry.place, entry.target)
        if stored.id != entry.id:
            raise BadCheckpoint(f"{entry.place} holds {stored.id} now, no longer {entry.id}")
        self._share(stored.manifest, entry)
        return self.candidate(stored, candidate.names)

    def _share(self, manifest: Manifest, entry: StoredEntry) -> None:
        """Leave a manifest to the other ranks of this node, if it is the first that reads it."""
        place, path = self._client.place, self._staging / entry.token
        if place.local_rank == 0 and place.local_world_size > 1:
            with suppress(OSError, PersistError):  # the others read it from storage then
                make_staging(self._staging)
                draft = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
                draft.write_text(manifest.to_json())
                draft.rename(path)

    def _shared(self, entry: StoredEntry) -> Manifest | None:
        """The manifest that the first rank of this node has left."""
        with suppress(BadCheckpoint):
            return read_manifest(self._staging, entry.token) if self._client.place.local_rank else None
        return None

    def settle(self) -> tuple[bool, Sequence[Rejected]]:
        """Publish checkpoints of which `list` saw all parts; whether there were any, and those that lack parts.

        The first rank calls it, when the agents of all nodes have started: none of an earlier launch writes any more.
        """
        if not self._is_unpublished:
            return False, ()
        try:
            settled = self._store.settle()
        except FastckptError as error:
            logger.warning("the parts that nodes have written could not be published: %s", error)
            return False, ()
        published = [each.id for each in settled if isinstance(each, Manifest)]
        for save in published:
            logger.warning("%s was on storage in unpublished parts, all complete; it is published now", save)
        lacking = [each for each in settled if isinstance(each, Unfinished)]
        return bool(published), [Rejected(RejectionKind.UNFINISHED, each.id, each.why) for each in lacking]

    def check(self, candidate: Candidate, name: str) -> None:
        """Compare a file with its manifest, and download it if the store is far; foreign files pass."""
        if candidate.record is not None:
            if self.is_far:
                make_staging(self._staging)
            into = self._downloads(candidate.record.id)
            self._store.fetch(candidate.record, [name], into, digests=self._digests)

    def reject(self, candidate: Candidate, faults: Faults, threads: int) -> None:
        """Quarantine a candidate, in the first rank, if that sees a fault, too: another rank's mount may be wrong."""
        self.has_quarantined = True
        if self._client.place.rank == 0:
            candidate = self.open(candidate)
            checked = candidate.faults(list(faults), threads)
            confirmed = {name: fault.why for name, fault in checked.items() if fault.is_damage}
            for name in faults.keys() - confirmed.keys():
                logger.warning("%s is not quarantined: rank 0 finds nothing wrong with it", candidate.files[name])
            if confirmed:
                self.quarantine(candidate.record, "; ".join(confirmed.values()))

    def quarantine(self, bad: Any, why: str) -> None:
        """Move a checkpoint, or a damaged place, to the quarantine, where it is never loaded nor deleted."""
        self.has_quarantined = True
        if self._client.place.rank == 0:
            try:
                logger.warning(coded("quarantined as %s: %s", "FC-018"), self._store.quarantine(bad, why), why)
            except PersistError as error:  # such as read-only storage: it is found bad again at the next resume
                logger.warning("%s; it stays where it is: %s", why, error)

    def drop(self, candidate: Candidate) -> None:
        """Remove the download of a candidate, once for all local ranks."""
        if self.is_far and self._client.place.local_rank == 0:
            remove_staging(self._downloads(candidate.record.id))

    def close(self) -> None:
        """Remove all that was left here for local ranks, once none needs it any more, and disconnect."""
        if self._client.place.local_rank == 0:
            remove_staging(self._staging)
        if "_store" in vars(self):
            self._store.close()

    def _downloads(self, id: SaveId) -> Path:
        return self._staging / "{}-{}".format(*id)


class RemoteTier(StorageTier):
    """The remote tier, which has copies of durable checkpoints: one that does not answer blocks no resume."""

    def list(self) -> Listing:
        """List as `StorageTier` does; if the store cannot be reached, it is listed as rejected."""
        try:
            return super().list()
        except PersistError as error:
            text = coded("the remote tier %s is ignored in this resume: %s", "FC-026")
            logger.warning(text, self.location, error)
            return Listing({}, [Rejected(RejectionKind.QUARANTINED, self.location, str(error))])
