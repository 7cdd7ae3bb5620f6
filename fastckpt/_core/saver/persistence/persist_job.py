"""The persist of one slot: its save goes to a durable store, whole or as one node's part."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt._core.format.completeness import RANKS, lacks, missing_files
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MEMBERS, OF_EACH_NODE, OF_NODE, Manifest
from fastckpt._core.memory import slots
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.saver.persistence.tenure import Tenure
from fastckpt._core.saver.slot import Slot
from fastckpt._core.storage.image_source import BadSource, ImageSource, PublishRequest
from fastckpt._core.storage.share import Share
from fastckpt._core.storage.store import Pending, Store
from fastckpt.errors import Superseded

PIN = "persist"
"""First word of the pins of persists."""


@dataclass(eq=False)
class PersistJob:
    """A slot that is to be persisted, and stays as it is until then.

    Attributes:
        target: Path that its user wants for the model.
        flush: True if nobody asked for it.
        lasting: True if no newer save may overtake it.
        attempts: Number of failures so far.
    """

    slot: Slot
    id: SaveId
    target: str
    flush: bool
    lasting: bool = True
    attempts: int = 0

    def pin(self) -> None:
        """Keep the slot as it is."""
        self.slot.pins[f"{PIN} {self.target}"] = f"step {self.id.step} is being persisted"

    def unpin(self) -> None:
        """Need the slot no more."""
        self.slot.pins.pop(f"{PIN} {self.target}", None)

    def hand_over(self, storage: Store, tenure: Tenure) -> Manifest | Pending:
        """Publish the slot's save, if no other job has replaced this one, then or meanwhile."""
        opening = Opening.of_slot(self.slot.path)
        if opening is not None:  # else `hand_over` finds its fault
            tenure.hold(opening)
        try:
            result = hand_over(storage, self.slot.path, self.id, self.target)
            if not isinstance(result, Manifest):
                part = GuardedPart(result, tenure, opening)
                return part.complete() or part
        except Superseded:
            tenure.check()  # it knows the newer one's owner
            raise
        tenure.check(opening)
        return result


class GuardedPart:
    """This node's part of a save: it counts, with those of others, only while this job may publish."""

    def __init__(self, part: Pending, tenure: Tenure, opening: Opening | None) -> None:
        self.id = part.id
        self.missing = part.missing
        self._part, self._tenure, self._opening = part, tenure, opening
        self._is_left_out = False

    def complete(self) -> Manifest | None:
        """Complete the checkpoint if all parts are there, as that of the part.

        Raises Superseded if others have taken the place of this job, or it has gone on.
        """
        self._tenure.demand()
        if self._is_left_out:
            raise Superseded(f"{self.id} is not reported: the nodes have gone on from an older save")
        manifest = self._part.complete()
        self._is_left_out = manifest is not None and not self._tenure.check(self._opening)
        return None if self._is_left_out else manifest


def hand_over(storage: Store, slot: Path, id: SaveId, target: str) -> Manifest | Pending:
    """Make a slot's save durable, with its model at ``target``.

    Returns the checkpoint's manifest; or, where nodes write parts of it, this node's part while others are missing.
    Raises BadSource if the slot does not hold the committed save any more.
    """
    # 1. read the records again: memory is the truth   2. details that describe the save, without those that locate it
    # 3. this node's files; the first node writes those that all have alike   4. publish, or contribute this node's part
    records = slots.read(slot)
    if records.committed != id:
        raise BadSource(f"{slot} does not hold {id} any more")
    details: dict[str, Any] = dict(records.details)
    for name in ("path", "rank"):
        details.pop(name, None)
    parent, world_size = details.pop("parent", None), details.pop("world_size", 1)
    node, nodes = details.pop("node", 0), details.pop("nodes", 1)
    common = records.common
    for name in (OF_EACH_NODE, MEMBERS):
        details.pop(name, None)
    sources = {
        name: ImageSource(slot / name, size, records.digests.get(name, ""))
        for name, size in records.files.items()
        if not name.startswith(OF_NODE) and (node == 0 or name not in common)  # the first node's will do
    }
    if written := _written(records, sources):
        details[RANKS] = written
    since = SaveId(*parent) if parent else None
    if nodes == 1:
        if missing := missing_files(sources.keys(), world_size, details):
            raise BadSource(f"{slot} is {lacks(missing, world_size)}")
        return storage.publish(PublishRequest(id, sources, target, since, world_size, details))
    share = Share(node, nodes, details.get("attempt", ""), target)
    return storage.contribute(PublishRequest(id, sources, "", since, world_size, details), share)


def _written(records: slots.Records, persisted: Collection[str]) -> dict[str, list[str]]:
    """Return the persisted files that each rank of this node wrote; empty if an earlier version wrote them."""
    assert records.begin is not None
    done = [records.done[writer] for writer in sorted(records.begin.writers)]
    if any("rank" not in each.details for each in done):
        return {}
    return {str(each.details["rank"]): sorted(each.files.keys() & persisted) for each in done}
