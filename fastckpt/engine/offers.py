"""What a rank could load: from memory, from storage, from a path that the user names."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastckpt.engine.link import Link
from fastckpt.errors import BadCheckpoint
from fastckpt.format.ids import SaveId
from fastckpt.format.manifest import MODEL
from fastckpt.memory import slots
from fastckpt.policy.resume import Candidate
from fastckpt.storage.directory import CheckpointDirectory, Stored

Files = dict[str, Path]


@dataclass(frozen=True)
class Offer:
    """A checkpoint that this rank could load.

    Attributes:
        files: Where its files are, by name.
        details: What was kept with it.
        verify: Raises BadCheckpoint if a file that this rank answers for is not what was saved.
    """

    files: Files
    details: dict[str, Any]
    verify: Callable[[], None]


class Offers:
    """Finds what one rank could load of a checkpoint directory.

    Args:
        own: Name of the file with this rank's own part; a checkpoint of fewer ranks may lack it.
        verifies: Names of the files whose digests this rank checks, on behalf of its node.

    Attributes:
        damaged: What lies on storage and is no whole checkpoint, and why.
    """

    def __init__(self, link: Link, directory: Path, own: str, verifies: tuple[str, ...]) -> None:
        self.damaged: list[str] = []
        self._link = link
        self._directory = directory
        self._own = own
        self._verifies = verifies

    def find(self) -> dict[Candidate, Offer]:
        """All checkpoints that hold what this rank needs. Those in memory stay until the link releases them."""
        if self._link.place.group_world_size > 1:
            return self._on_storage()  # nodes do not agree on what is in memory yet
        return self._in_memory() | self._on_storage()

    def at(self, path: Path) -> tuple[SaveId | None, Offer]:
        """What lies at a path: a checkpoint of this directory, or files that something else wrote."""
        model = path / MODEL if path.is_dir() else path
        parts = self._parts()
        for save, found in parts.items():
            if any(os.path.realpath(stored.path_of(MODEL)) == str(model) for stored in found if _has_model(stored)):
                return save, self._offer(found)
        own = {found.name: found for found in model.parent.glob("rank_*.pt")} if path.is_dir() else {}
        return None, Offer({MODEL: model, **own}, {}, lambda: None)

    def _in_memory(self) -> dict[Candidate, Offer]:
        offers = {}
        for slot in self._link.pin():
            records = slots.read(slot)
            if records.committed is None:
                continue
            files = {name: slot / name for name in records.files}
            if self._suffices(files, records.details.get("world_size", 1)):
                candidate = Candidate(*records.committed, "memory")
                offers[candidate] = Offer(files, records.details, partial(_check_sizes, files, records.files))
        return offers

    def _on_storage(self) -> dict[Candidate, Offer]:
        offers = {}
        for save, found in self._parts().items():
            offer = self._offer(found)
            if self._suffices(offer.files, found[0].manifest.world_size):
                offers[Candidate(*save, "storage")] = offer
        return offers

    def _parts(self) -> dict[SaveId, list[Stored]]:
        """The parts of all nodes, by what was saved; the first node's, with the model, comes first."""
        parts: dict[SaveId, list[Stored]] = {}
        for path in [self._directory, *sorted(self._directory.glob(".fastckpt/node-*"))]:
            scan = CheckpointDirectory(path).scan()
            self.damaged += [f"{where}: {why}" for where, why in scan.damaged]
            for stored in scan.whole:
                parts.setdefault(stored.id, []).append(stored)
        return parts

    def _offer(self, parts: list[Stored]) -> Offer:
        files = {entry.name: stored.path_of(entry.name) for stored in parts for entry in stored.manifest.files}
        return Offer(files, dict(parts[0].manifest.details), partial(self._verify, parts))

    def _suffices(self, files: Files, world_size: int) -> bool:
        """Whether this rank finds all that it can expect of a checkpoint of ``world_size`` ranks."""
        return MODEL in files and (self._own in files or self._link.place.rank >= world_size)

    def _verify(self, parts: list[Stored]) -> None:
        for stored in parts:
            stored.verify([entry.name for entry in stored.manifest.files if entry.name in self._verifies])


def _has_model(stored: Stored) -> bool:
    return any(entry.name == MODEL for entry in stored.manifest.files)


def _check_sizes(files: Files, sizes: dict[str, int]) -> None:
    for name, path in files.items():
        if path.stat().st_size != sizes[name]:
            raise BadCheckpoint(f"{path} has {path.stat().st_size} bytes; it was committed with {sizes[name]}")
