"""What a rank could load: from memory, from storage, from a path that the user names."""

import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fastckpt.engine.link import Link
from fastckpt.engine.staging import make_staging, remove_staging, staging_path
from fastckpt.errors import BadCheckpoint, PersistError
from fastckpt.format.ids import SaveId
from fastckpt.format.manifest import MODEL
from fastckpt.memory import slots
from fastckpt.policy.resume import Candidate
from fastckpt.storage.commit import ours
from fastckpt.storage.store import Kept, Store, is_url, normalised, open_store
from fastckpt.storage.stored import Stored, digest, read_manifest

logger = logging.getLogger("fastckpt")

Files = dict[str, Path]
_STEP = re.compile("/checkpoint-[0-9]+(/|$)")


class Durable(NamedTuple):
    """A checkpoint in a store."""

    storage: Store
    stored: Kept


@dataclass(frozen=True)
class Offer:
    """A checkpoint that this rank could load.

    Attributes:
        files: Where its files are, by name.
        details: What was kept with it.
        check: Raises BadCheckpoint or OSError if the file of that name is not what was saved.
        durable: The checkpoint on storage that the files are of; None for files in memory, or of something else.
    """

    files: Files
    details: dict[str, Any]
    check: Callable[[str], None]
    durable: Durable | None = None


class Offers:
    """Finds what one rank could load of a checkpoint directory.

    Args:
        location: The checkpoint directory: a path, or the URL of a store.
        own: Name of the file with this rank's own part; a checkpoint of fewer ranks may lack it.
        digests: Whether files are checked by their digests, where there are some, or by their sizes alone.

    Attributes:
        damaged: What lies on storage and is no whole checkpoint, and why.
        quarantined: What was found bad by an earlier resume, and why.
    """

    def __init__(self, link: Link, location: str, own: str, *, digests: bool) -> None:
        self.damaged: list[tuple[Store, Path | str, str]] = []
        self.quarantined: list[tuple[Path | str, str]] = []
        self.directory = location
        self._levels = {"storage": location} | ({"remote": link.wishes.remote} if link.wishes.remote else {})
        self._link = link
        self._own = own
        self._digests = digests
        self._staging = staging_path(link.arena)
        self._stores = ExitStack()

    @property
    def has_far(self) -> bool:
        """Whether it takes a network and a client to see all that is durable."""
        return any(is_url(location) for location in self._levels.values())

    def find(self) -> dict[Candidate, Offer]:
        """All checkpoints that hold what this rank needs. Those in memory stay until the link releases them."""
        return self.near()[0] | self._on_storage()

    def near(self) -> tuple[dict[Candidate, Offer], tuple[int, ...]]:
        """Those of them in memory, and history and step of the newest durable checkpoint, if there is one."""
        if self._link.place.group_world_size > 1:
            return {}, ()  # nodes do not agree on what is in memory yet
        return self._in_memory(), self._link.durable

    def at(self, path: str) -> tuple[SaveId | None, Offer]:
        """What lies at a path or URL: a checkpoint of ours, or files that something else wrote."""
        if is_url(path):
            return self._at_url(normalised(path))
        place = Path(normalised(path))
        model = place / MODEL if place.is_dir() else place
        for save, found in {} if is_url(self.directory) else self._durable(self.directory).items():
            storage, stored = found
            if _has_model(stored) and os.path.realpath(storage.file(stored, MODEL, place)) == str(model):
                return save, self._offer(found)
        if record := self._record_of(model):
            return record.id, self._offer(Durable(open_store(record.place.parent), record))
        own = {found.name: found for found in model.parent.glob("rank_*.pt")} if place.is_dir() else {}
        return None, Offer({MODEL: model, **own}, {}, lambda name: None)

    def _record_of(self, model: Path) -> Stored | None:
        """What a manifest tells of a file that no checkpoint of this directory has: it must not be loaded unchecked.

        Another directory may have it; or it was named by its user, and the rest of its checkpoint is bad, or set aside.
        """
        beside = read_manifest(model.parent)
        if model.name == MODEL and beside and not beside.target:
            return Stored(beside, model.parent, None)
        bad = [(where, why) for _, where, why in self.damaged] + self.quarantined
        records = []
        for where, why in bad:
            if str(where) == str(model):
                raise BadCheckpoint(why)
            manifest = None if isinstance(where, str) else ours(where)
            if manifest and manifest.target and os.path.realpath(Path(self.directory, manifest.target)) == str(model):
                records.append(Stored(manifest, Path(where), model))
        return max(records, key=lambda record: record.id, default=None)

    def _at_url(self, url: str) -> tuple[SaveId, Offer]:
        """The newest checkpoint that lies at a URL, below it, or whose model was copied there."""
        outside = _STEP.search(url) and not url.startswith(f"{self.directory}/")
        root = url[: _STEP.search(url).start()] if outside else self.directory  # type: ignore[union-attr]
        for save, found in self._durable(root).items() if is_url(root) else ():
            if any(f"{where}/".startswith(f"{url}/") for where in (found.stored.place, found.stored.path)):
                return save, self._offer(found)
        raise BadCheckpoint(f"{url} is no checkpoint of ours in {root}")

    def drop(self, candidate: Candidate) -> None:
        """Remove what was downloaded of a checkpoint that some rank cannot use: the next one needs the room."""
        if self._link.place.local_rank == 0:
            remove_staging(self._staging / _folder(candidate.id))

    def close(self) -> None:
        """Remove what was downloaded, once no local rank needs it any more, and hang up."""
        if self._link.place.local_rank == 0:
            remove_staging(self._staging)
        self._stores.close()

    def _in_memory(self) -> dict[Candidate, Offer]:
        offers = {}
        for slot in self._link.pin():
            records = slots.read(slot)
            if records.committed is None:
                continue
            files = {name: slot / name for name in records.files}
            if self._suffices(files, records.details.get("world_size", 1)):
                compare = self._digests and slot not in self._link.verified
                check = partial(_check_image, slot, records.files, records.digests if compare else {})
                offers[Candidate(*records.committed, "memory")] = Offer(files, records.details, check)
        return offers

    def _on_storage(self) -> dict[Candidate, Offer]:
        offers = {}
        for tier, location in self._levels.items():
            for save, found in self._durable_if_reachable(tier, location).items():
                offer = self._offer(found)
                if self._suffices(offer.files, found.stored.manifest.world_size):
                    offers[Candidate(*save, tier)] = offer
        return offers

    def _durable_if_reachable(self, tier: str, location: str) -> dict[SaveId, Durable]:
        """What is whole; a second level that does not answer is something that exists, and holds up nobody."""
        try:
            return self._durable(location)
        except PersistError as error:
            if tier == "storage":
                raise
            logger.warning("%s is passed over: %s", location, error)
            self.quarantined.append((location, str(error)))
            return {}

    def _durable(self, location: str) -> dict[SaveId, Durable]:
        """What is whole there, by what was saved."""
        storage = self._open(open_store(location))
        scan = storage.scan()
        self.damaged += [(storage, where, why) for where, why in scan.damaged]
        self.quarantined += scan.quarantined
        return {stored.id: Durable(storage, stored) for stored in scan.whole}

    def _open(self, storage: Store) -> Store:
        self._stores.callback(storage.close)
        return storage

    def _offer(self, found: Durable) -> Offer:
        storage, stored = found
        into = self._staging / _folder(stored.id)
        files = {entry.name: storage.file(stored, entry.name, into) for entry in stored.manifest.files}
        return Offer(files, dict(stored.manifest.details), partial(self._check_stored, found, into), found)

    def _check_stored(self, found: Durable, into: Path, name: str) -> None:
        if is_url(str(found.storage.path)):
            make_staging(self._staging)
        found.storage.fetch(found.stored, [name], into, digests=self._digests)

    def _suffices(self, files: Files, world_size: int) -> bool:
        """Whether this rank finds all that it can expect of a checkpoint of ``world_size`` ranks."""
        return MODEL in files and (self._own in files or self._link.place.rank >= world_size)


def _folder(id: tuple[int, int]) -> str:
    return "{}-{}".format(*id)


def _has_model(stored: Kept) -> bool:
    return any(entry.name == MODEL for entry in stored.manifest.files)


def _check_image(slot: Path, sizes: dict[str, int], digests: dict[str, str], name: str) -> None:
    path = slot / name
    if damage := slots.damage(slot, {name: sizes[name]}):
        raise BadCheckpoint(damage)
    if name in digests and (now := digest(path)) != digests[name]:
        raise BadCheckpoint(f"{path} is damaged: its xxh3-128 is {now}; it was {digests[name]} once it was committed")
