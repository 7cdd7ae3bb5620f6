"""Sizes of a checkpoint's files as the memory of a job takes them, also of one that something else wrote."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastckpt._core.format.completeness import RANKS
from fastckpt._core.format.manifest import COMMON, METADATA, MODEL
from fastckpt._core.inspect.address import parse
from fastckpt._core.inspect.checkpoint_files import CheckpointFiles, find
from fastckpt._core.inspect.inventory import Inventory, InventoryFile, InventoryItem
from fastckpt._core.policy.resource_plan import PAGE, Role, SavedFile, pages
from fastckpt.errors import ConfigError

SLACK = 16384
"""Bytes that an image of a torch.save file has beyond it, as `format.skeleton` leaves them."""
OWN = 32768
"""Bytes of the image of a rank's own state: its random generators, and the measurements of `Checkpointer`."""
_OWN, _SHARD = re.compile(r"rank_(\d+)\.pt"), re.compile(r"(?:__|node_rank_)(\d+)(?:_\d+)?\.distcp")


@dataclass(frozen=True)
class CheckpointSizes:
    """Sizes in a checkpoint, from which memory is planned.

    Attributes:
        source: The checkpoint.
        files: Its files, as images.
        world: Ranks that saved it; None if that is not known.
        nodes: Nodes that saved it, if its details have the number.
        location: The checkpoint directory that it is in; empty for a file, or a directory of files.
        assumed: Assumptions that the checkpoint does not show, for people to read; empty for nothing.
    """

    source: CheckpointFiles
    files: list[SavedFile]
    world: int | None
    nodes: int | None
    assumed: str = ""
    location: str = ""

    @property
    def total(self) -> int:
        """Bytes of all files, as they are on storage."""
        return sum(file.size for file in self.files)

    @property
    def is_foreign(self) -> bool:
        """True if another library wrote the checkpoint."""
        return self.source.item is None


def checkpoint_sizes(text: str, shm_dir: str) -> CheckpointSizes:
    """The sizes of the checkpoint that ``text`` names; raises as `find`, and ConfigError if it has no files."""
    source = find(text, shm_dir)
    files = dict(source.files)
    files |= {name: part for file in source.files.values() for name, part in file.parts.items()}
    if not files or not sum(file.size for file in files.values()):
        raise ConfigError(f"{text} has no files with bytes, so no sizes")
    item = source.item
    if item is None:
        return _foreign(source, files)
    written = _writers(item.details)
    saved = [_saved(name, file.size, written.get(name)) for name, file in sorted(files.items())]
    count = item.details.get("nodes")
    nodes = count if type(count) is int and count > 0 else None
    if item.tier == "memory" and nodes not in (None, 1):
        raise ConfigError(f"{text} is in the memory of one of {nodes} nodes alone; name one that is on storage")
    return CheckpointSizes(source, saved, item.world, nodes, location=parse(text).location)


def _writers(details: Mapping[str, object]) -> dict[str, int]:
    """The rank that wrote each file, by its name, as far as the details have it."""
    ranks = details.get(RANKS)
    pairs = ranks.items() if isinstance(ranks, dict) else ()
    return {
        name: int(rank)
        for rank, names in pairs
        if rank.isascii() and rank.isdigit() and len(rank) < 10 and isinstance(names, list)
        for name in names
        if isinstance(name, str)
    }


def _saved(name: str, size: int, rank: int | None) -> SavedFile:
    if name in COMMON:
        return SavedFile(name, size, Role.NODE)
    for pattern, role in ((_OWN, Role.RANK), (_SHARD, Role.SHARD)):
        if match := pattern.fullmatch(name):
            return SavedFile(name, size, role, int(match[1]))
    return SavedFile(name, size, Role.OTHER, rank)


def _foreign(source: CheckpointFiles, files: Mapping[str, InventoryFile]) -> CheckpointSizes:
    """Sizes as images of another program's files: a file of torch.save with slack, shards as they are."""
    is_sharded = METADATA in files
    saved = list[SavedFile]()
    for name, file in sorted(files.items()):
        kind = _saved(name, file.size, None)
        if kind.role is Role.OTHER or (kind.role is Role.RANK and not is_sharded and source.is_file):
            kind = SavedFile(MODEL if len(files) == 1 else name, file.size, Role.NODE)
        size = file.size if kind.role is Role.SHARD or name == METADATA else image(file.size)
        saved.append(SavedFile(kind.name, pages(size), kind.role, kind.rank))
    world = 1 + max((file.rank for file in saved if file.rank is not None), default=-1)
    has_own = any(file.role is Role.RANK for file in saved)
    if not has_own:
        saved += [SavedFile(f"rank_{rank}.pt", OWN, Role.RANK, rank) for rank in range(max(1, world))]
    assumed = "" if has_own else f"a file of {OWN} bytes of each rank's own state, which it does not have"
    return CheckpointSizes(source, saved, world or None, None, assumed)


def image(size: int) -> int:
    """Bytes of an image of a torch.save file that has no slack yet."""
    return -(-(size + SLACK) // PAGE) * PAGE


def sizes_by_step(inventory: Inventory, item: InventoryItem) -> dict[int, int]:
    """Bytes of the whole checkpoints of a history and those before it, by step, as many ranks saved them."""
    alike = (other for other in inventory.whole if other.world == item.world and other.tier != "remote")
    return dict(sorted((other.step, other.size) for other in _line(alike, item) if other.step is not None))


def _line(items: Iterable[InventoryItem], newest: InventoryItem) -> list[InventoryItem]:
    """Checkpoints that are not newer, of the newest history that has each step."""
    if newest.id is None:
        return []
    found = dict[int, InventoryItem]()
    for item in items:
        if item.id is None or item.step is None or item.id > newest.id or item.step > (newest.step or 0):
            continue
        # Memory has one node's part of several: storage, which has all, counts.
        known = found.get(item.step)
        if known is None or (item.history or 0, item.tier == "storage") > (known.history or 0, known.tier == "storage"):
            found[item.step] = item
    return list(found.values())
