"""Gives what is in a slot to a durable store: whole, or as one node's part."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fastckpt._core.format.completeness import RANKS, lacks, missing_files
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MEMBERS, OF_EACH_NODE, OF_NODE, Manifest
from fastckpt._core.memory import slots
from fastckpt._core.storage.image_source import BadSource, ImageSource
from fastckpt._core.storage.share import Share
from fastckpt._core.storage.store import Pending, Store


def hand_over(storage: Store, slot: Path, id: SaveId, target: str) -> Manifest | Pending:
    """Make what is in a slot durable, with its model at ``target``.

    Returns the checkpoint's manifest; or, where nodes write parts of it, this node's while others are not there.
    Raises BadSource if the slot does not hold any more what was committed there.
    """
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
        return storage.publish(id, sources, target=target, parent=since, world_size=world_size, details=details)
    share = Share(node, nodes, details.get("attempt", ""), target)
    part = storage.contribute(id, sources, share, parent=since, world_size=world_size, details=details)
    return part.complete() or part


def _written(records: slots.Records, persisted: Collection[str]) -> dict[str, list[str]]:
    """What each rank of this node has written of the files that are persisted; empty if earlier versions wrote it."""
    assert records.begin is not None
    done = [records.done[writer] for writer in sorted(records.begin.writers)]
    if any("rank" not in each.details for each in done):
        return {}
    return {str(each.details["rank"]): sorted(each.files.keys() & persisted) for each in done}
