"""What a rank could load: from memory, from storage, from a path that the user names."""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import Manifest, file_named
from fastckpt._core.memory import slots
from fastckpt._core.policy.resume import CheckpointLocation
from fastckpt._core.storage.download_dir import make_staging, remove_staging, staging_path
from fastckpt._core.storage.local.stored import Stored, digest, ours, read_manifest
from fastckpt._core.storage.share import Unfinished
from fastckpt._core.storage.store import Store, StoredCheckpoint, is_url, normalised, open_store
from fastckpt.errors import BadCheckpoint, FastckptError, PersistError

logger = logging.getLogger("fastckpt")

Files = dict[str, Path]
OTHER_KIND = "is of another kind of checkpointer"
"""What is said of such a checkpoint."""
_STEP = re.compile("/checkpoint-[0-9]+(/|$)")


class DurableCheckpoint(NamedTuple):
    """A checkpoint in a store."""

    storage: Store
    stored: StoredCheckpoint


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that this rank could load.

    Attributes:
        files: Where its files are, by name.
        details: What was kept with it.
        check: Raises BadCheckpoint or OSError if the file of that name is not what was saved.
        durable: The checkpoint on storage that the files are of; None for files in memory, or of something else.
        names: What its directories on storage are called: one save may have been persisted under several names.
    """

    files: Files
    details: dict[str, Any]
    check: Callable[[str], None]
    durable: DurableCheckpoint | None = None
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RequiredFiles:
    """What a rank needs of a checkpoint.

    Attributes:
        main: Name of the file that each checkpoint has.
        own: Name of the file with this rank's own part; a checkpoint of fewer ranks may lack it.
        shards: Names of the files without which the memory of one of several nodes is not enough for this rank; empty
            if ``main`` is all that ranks have in common. It is enough for the same number of ranks only.
    """

    main: str
    own: str
    shards: tuple[str, ...] = ()

    def are_met(self, files: Files, place: RankInfo, world_size: int) -> bool:
        """Whether this rank finds all that it can expect of a checkpoint of ``world_size`` ranks."""
        return self.main in files and (self.own in files or place.rank >= world_size)

    def are_met_by_a_node(self, files: Files, place: RankInfo, details: Mapping[str, Any]) -> bool:
        """Whether it does in the memory of a node, of those that saved it."""
        world_size = details.get("world_size", 1)
        alone = not self.shards or details.get("nodes", 1) == 1
        shards = world_size == place.world_size and all(name in files for name in self.shards)
        return self.are_met(files, place, world_size) and (alone or shards)


class CandidateFinder:
    """Finds what one rank could load of a checkpoint directory.

    Args:
        location: The checkpoint directory: a path, or the URL of a store.
        needs: What this rank needs of a checkpoint.
        digests: Whether files are checked by their digests, where there are some, or by their sizes alone.

    Attributes:
        damaged: What lies on storage and is no whole checkpoint, and why.
        quarantined: What was found bad by an earlier resume, and why.
        other: Whole checkpoints of another kind.
        partial: What memory holds that is not enough for this rank, and why.
        unfinished: What several nodes were writing, newer than all that counts on storage; after `settle`.
    """

    def __init__(self, link: SaverClient, location: str, needs: RequiredFiles, *, digests: bool) -> None:
        self.damaged: list[tuple[Store, Path | str, str]] = []
        self.quarantined: list[tuple[Path | str, str]] = []
        self.other: list[Path | str] = []
        self.partial: list[str] = []
        self.unfinished: list[Unfinished] = []
        self._gathering: list[Store] = []
        self.directory = location
        self._levels = {"storage": location} | ({"remote": link.wishes.remote} if link.wishes.remote else {})
        self._link = link
        self._needs = needs
        self._digests = digests
        self._staging = staging_path(link.arena)
        self._stores = ExitStack()
        self._names: defaultdict[SaveId, set[str]] = defaultdict(set)

    @property
    def has_far(self) -> bool:
        """Whether it takes a network and a client to see all that is durable."""
        return any(is_url(location) for location in self._levels.values())

    def find(self) -> dict[CheckpointLocation, Candidate]:
        """All checkpoints that hold what this rank needs. Those in memory stay until the link releases them."""
        for found_before in (self.damaged, self.quarantined, self.other, self.partial, self._gathering):
            found_before.clear()
        here, stored = self._in_memory(), self._on_storage()
        found = (
            stored
            | {candidate: offer for candidate, offer in here.items() if self._is_whole(offer)}
            | {
                candidate._replace(tier="mixed"): _joined(offer, stored[there])
                for candidate, offer in here.items()
                for tier in self._levels
                if candidate.attempt and (there := candidate._replace(tier=tier, node=0)) in stored
            }
        )
        lacking = here.keys() - found.keys() - {candidate._replace(tier="memory") for candidate in found}
        self.partial += [f"{SaveId(*each.id)} in {each.where} (has not all of it)" for each in sorted(lacking)]
        return found

    def settle(self) -> bool:
        """Publish what `find` saw that nodes have written whole and nobody has published; whether there was any.

        The first rank calls it, when the agents of all nodes are there: none of an earlier launch writes any more.
        """
        self.unfinished.clear()
        published = False
        for storage in self._gathering:
            try:
                settled = storage.settle()
            except FastckptError as error:
                logger.warning("what nodes have written in parts is not published: %s", error)
                continue
            self.unfinished += [each for each in settled if isinstance(each, Unfinished)]
            for manifest in (each for each in settled if isinstance(each, Manifest)):
                published = True
                logger.warning("%s was on storage in parts, all of them; it is published now", manifest.id)
        return published

    def near(self) -> tuple[dict[CheckpointLocation, Candidate], tuple[int, ...]]:
        """Those of them in memory, and history and step of the newest durable checkpoint, if there is one."""
        here = {candidate: offer for candidate, offer in self._in_memory().items() if self._is_whole(offer)}
        return here, self._link.durable

    def held(self) -> dict[CheckpointLocation, bool]:
        """What this node holds in memory, and whether that is enough for this rank; it stays as in `find`."""
        return {candidate: self._is_whole(offer) for candidate, offer in self._in_memory().items()}

    def at(self, path: str) -> tuple[SaveId | None, Candidate]:
        """What lies at a path or URL: a checkpoint of ours, or files that something else wrote."""
        if is_url(path):
            return self._at_url(normalised(path))
        place = Path(normalised(path))
        main = place / self._needs.main if place.is_dir() else place
        for save, found in {} if is_url(self.directory) else self._durable(self.directory).items():
            offer = self._offer(found)
            if self._needs.main in offer.files and _is_file_of(found.stored, self._needs.main, main):
                return save, offer
        if record := self._record_of(main):
            return record.id, self._offer(DurableCheckpoint(open_store(record.place.parent), record))
        others = {found.name: found for found in place.iterdir()} if place.is_dir() else {}
        return None, Candidate({**others, self._needs.main: main}, {}, lambda name: None)

    def _record_of(self, main: Path) -> Stored | None:
        """What a manifest tells of a file that no checkpoint of this directory has: it must not be loaded unchecked.

        Another directory may have it; or it was named by its user, and the rest of its checkpoint is bad, or set aside.
        """
        beside = read_manifest(main.parent)
        if main.name == self._needs.main and beside:
            return Stored(beside, main.parent, None)
        bad = [(where, why) for _, where, why in self.damaged] + self.quarantined
        records = []
        for where, why in bad:
            if str(where) == str(main):
                raise BadCheckpoint(why)
            manifest = None if isinstance(where, str) else ours(where)
            named = file_named(manifest.target) if manifest else ""
            if manifest and named and os.path.realpath(Path(self.directory, named)) == str(main):
                records.append(Stored(manifest, Path(where), main))
        return max(records, key=lambda record: record.id, default=None)

    def _at_url(self, url: str) -> tuple[SaveId, Candidate]:
        """The newest checkpoint that lies at a URL, below it, or whose model was copied there."""
        outside = _STEP.search(url) and not url.startswith(f"{self.directory}/")
        root = url[: _STEP.search(url).start()] if outside else self.directory  # type: ignore[union-attr]
        for save, found in self._durable(root).items() if is_url(root) else ():
            if any(f"{where}/".startswith(f"{url}/") for where in (found.stored.place, found.stored.path)):
                return save, self._offer(found)
        raise BadCheckpoint(f"{url} is no checkpoint of ours in {root}")

    def is_elsewhere(self, offer: Candidate) -> bool:
        """Whether what `at` found is of another checkpoint directory."""
        place = str(offer.durable.stored.place) if offer.durable else ""
        return not any(place.startswith(f"{location}/") for location in self._levels.values())

    def drop(self, candidate: CheckpointLocation) -> None:
        """Remove what was downloaded of a checkpoint that some rank cannot use: the next one needs the room."""
        tier = "storage" if candidate.tier == "mixed" else candidate.tier
        if self._link.place.local_rank == 0 and is_url(self._levels.get(tier, "")):
            remove_staging(self._staging / _folder(candidate.id))

    def close(self) -> None:
        """Remove what was downloaded, once no local rank needs it any more, and hang up."""
        if self._link.place.local_rank == 0:
            remove_staging(self._staging)
        self._stores.close()

    def _in_memory(self) -> dict[CheckpointLocation, Candidate]:
        """What is committed on this node, be it enough for this rank or not."""
        offers, place = {}, self._link.place
        for slot in self._link.pin():
            records = slots.read(slot)
            if records.committed is None:
                continue
            attempt = _attempt(records.details)
            if place.group_world_size > 1 and not attempt:
                self.partial.append(f"{records.committed} in {slot} (the other nodes may have another of this step)")
                continue
            files = {name: slot / name for name in records.files}
            if self._needs.main not in files:
                self.other.append(slot)
            compare = self._digests and slot not in self._link.verified
            check = partial(_check_image, slot, records.files, records.digests if compare else {})
            candidate = CheckpointLocation(*records.committed, "memory", place.group_rank, attempt)
            offers[candidate] = Candidate(files, records.details, check)
        return offers

    def _is_whole(self, offer: Candidate) -> bool:
        return self._needs.are_met_by_a_node(offer.files, self._link.place, offer.details)

    def _on_storage(self) -> dict[CheckpointLocation, Candidate]:
        offers = {}
        for tier, location in self._levels.items():
            for save, found in self._durable_if_reachable(tier, location).items():
                offer = self._offer(found)
                if self._needs.are_met(offer.files, self._link.place, found.stored.manifest.world_size):
                    offers[CheckpointLocation(*save, tier, 0, _attempt(offer.details))] = offer
                elif self._needs.main not in offer.files:
                    self.other.append(found.stored.path)
        return offers

    def _durable_if_reachable(self, tier: str, location: str) -> dict[SaveId, DurableCheckpoint]:
        """What is whole; a second level that does not answer is something that exists, and holds up nobody."""
        try:
            return self._durable(location)
        except PersistError as error:
            if tier == "storage":
                raise
            logger.warning("%s is passed over: %s", location, error)
            self.quarantined.append((location, str(error)))
            return {}

    def _durable(self, location: str) -> dict[SaveId, DurableCheckpoint]:
        """What is whole there, by what was saved."""
        storage = self._open(open_store(location))
        scan = storage.scan()
        self.damaged += [(storage, where, why) for where, why in scan.damaged]
        self.quarantined += scan.quarantined
        for stored in scan.places:
            self._names[stored.id].add(str(stored.place).rpartition("/")[2])
        newest = max((stored.id for stored in scan.whole), default=None)
        if any(newest is None or id > newest for id in scan.gathered):
            self._gathering.append(storage)
        return {stored.id: DurableCheckpoint(storage, stored) for stored in scan.distinct}

    def _open(self, storage: Store) -> Store:
        self._stores.callback(storage.close)
        return storage

    def _offer(self, found: DurableCheckpoint) -> Candidate:
        storage, stored = found
        into = self._staging / _folder(stored.id)
        files = {entry.name: storage.file(stored, entry.name, into) for entry in stored.manifest.files}
        names = frozenset(self._names[stored.id])
        return Candidate(files, dict(stored.manifest.details), partial(self._check_stored, found, into), found, names)

    def _check_stored(self, found: DurableCheckpoint, into: Path, name: str) -> None:
        if is_url(str(found.storage.path)):
            make_staging(self._staging)
        found.storage.fetch(found.stored, [name], into, digests=self._digests)


def _is_file_of(stored: StoredCheckpoint, name: str, path: Path) -> bool:
    """Whether a file is this checkpoint's, at its place or at the path that its user named."""
    assert isinstance(stored, Stored)
    named = stored.target is not None and os.path.realpath(stored.target) == str(path)
    return os.path.realpath(stored.path_of(name)) == str(path) or (named and stored.owns_target())


def _joined(here: Candidate, stored: Candidate) -> Candidate:
    """One save, with each file from memory that is there, and the others from storage."""

    def check(name: str) -> None:
        (here if name in here.files else stored).check(name)

    return Candidate(stored.files | here.files, here.details, check)


def _attempt(details: Mapping[str, Any]) -> str:
    return str(details.get("attempt", ""))


def _folder(id: tuple[int, int]) -> str:
    return "{}-{}".format(*id)


def _check_image(slot: Path, sizes: dict[str, int], digests: dict[str, str], name: str) -> None:
    path = slot / name
    if damage := slots.damage(slot, {name: sizes[name]}):
        raise BadCheckpoint(damage)
    if name in digests and (now := digest(path)) != digests[name]:
        raise BadCheckpoint(f"{path} is damaged: its xxh3-128 is {now}; it was {digests[name]} once it was committed")
