"""Saves that a node has in its memory: those of its own ranks, in slots, and small files of other nodes' ranks.

A node keeps the small files of others so that the loss of one host loses no rank's state. They are in a directory of
the arena for each save, with the done records of the ranks that wrote them. Large ones are beside them, or in the same
place of a folder on a disk.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import COMMON, OF_EACH_NODE
from fastckpt._core.memory import slots
from fastckpt._core.memory.copies_folder import roots_of
from fastckpt._core.memory.records import make_folders, names_in, remove_any
from fastckpt._core.memory.slots import SlotDone

KEPT = "kept"
"""The directory of an arena with files of other nodes' ranks."""
_NAME = re.compile("([0-9]{1,18})-([0-9]{1,18})-[0-9a-f]{16}")


@dataclass(frozen=True)
class HeldSave:
    """Part of a save that one node holds.

    Attributes:
        attempt: The token that ranks of all nodes share from one load to the next.
        details: The details of this node's ranks; of another's, if it has none of its own.
        roots: The directory of each file.
        sizes: Bytes of each file.
        digests: xxh3-128 of files for which it is known.
        parts: The done records of ranks, by their numbers among the ranks of all nodes.
        slot: The slot with the parts of this node's ranks; None if it has kept those of others only.
        common: The files that each node has of its own, with equal contents if the ranks' states are.
    """

    id: SaveId
    attempt: str
    details: Mapping[str, Any]
    roots: Mapping[str, Path]
    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    parts: Mapping[int, SlotDone]
    slot: Path | None = None
    common: frozenset[str] = frozenset()

    @property
    def files(self) -> dict[str, Path]:
        """Paths of the files, by name."""
        return {name: root / name for name, root in self.roots.items()}

    @property
    def own_files(self) -> dict[str, int]:
        """Sizes of the files that this node's ranks have written and no other node has."""
        return {name: size for name, size in self.sizes.items() if self._is_own(name) and name not in self.common}

    def _is_own(self, name: str) -> bool:
        return self.slot is not None and self.roots[name] == self.slot


@dataclass
class _Kept:
    parts: dict[int, SlotDone] = field(default_factory=dict)
    roots: dict[str, Path] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def held_saves(arena: Path, of: Iterable[Path]) -> list[HeldSave]:
    """The saves in these slots of an arena, with its copies of other nodes' files; and saves of such copies alone.

    Records that cannot be read, or were not written by us, count as not there.
    """
    kept = _kept(arena)
    found = []
    for slot in of:
        if (own := _of_slot(slot)) is not None:
            found.append(_joined(own, kept.pop((own.id, own.attempt), _Kept())))
    for (id, attempt), more in kept.items():
        details = next(iter(more.parts.values())).details
        common = frozenset(details.get(OF_EACH_NODE, COMMON))
        found.append(_joined(HeldSave(id, attempt, details, {}, {}, {}, {}, common=common), more))
    return found


def keep(
    arena: Path,
    id: SaveId,
    attempt: str,
    parts: Mapping[int, SlotDone],
    contents: Mapping[str, bytes],
    digests: Mapping[str, str],
) -> None:
    """Keep files of other nodes' ranks, whole or not at all; raises OSError, and ValueError for unfit names.

    Args:
        arena: The arena of this node.
        id: The save.
        attempt: Its token.
        parts: The done records of the ranks that wrote them, by rank.
        contents: The bytes of the files, by name.
        digests: Their xxh3-128.
    """
    if not all(slots.is_image(name) for name in contents):
        raise ValueError(f"{sorted(contents)} are no names of files of a checkpoint")
    place = kept_place(arena, id, attempt)
    make_folders(arena, place)
    for name, data in contents.items():
        path = place / name
        make_folders(place, path.parent)
        temporary = path.with_name(f".new-{path.name}")
        remove_any(temporary)
        temporary.write_bytes(data)
        temporary.rename(path)
    # Digests of files from several nodes come together here; done records last, because they make the rest count.
    keep_digests(place, id, digests)
    for rank, done in parts.items():
        slots.commit(place, rank, done)


def keep_digests(place: Path, id: SaveId, digests: Mapping[str, str]) -> None:
    """Add digests of files that are kept of a save; one thread at a time does."""
    slots.write_digests(place, id, slots.read_digests(place, id) | dict(digests))


def kept_places(arena: Path) -> dict[Path, SaveId]:
    """The places in which files of a save are kept; paths of other names are removed."""
    found = places_in(arena / KEPT)
    for name in names_in(arena / KEPT):
        if arena / KEPT / name not in found:
            remove_any(arena / KEPT / name)
    return found


def places_in(folder: Path) -> dict[Path, SaveId]:
    """The places of a folder that have a name of `place_name`, and the save of each."""
    names = {name: _NAME.fullmatch(name) for name in names_in(folder)}
    return {folder / name: SaveId(int(match[1]), int(match[2])) for name, match in names.items() if match}


def place_name(id: SaveId, token: str) -> str:
    """The name of the place for something of a save; a token distinguishes it from others of the same id."""
    return f"{id.history}-{id.step}-{hashlib.sha256(token.encode()).hexdigest()[:16]}"


def kept_place(arena: Path, id: SaveId, attempt: str) -> Path:
    """Return the directory for the files of other nodes' ranks of a save."""
    return arena / KEPT / place_name(id, attempt)


def _kept(arena: Path) -> dict[tuple[SaveId, str], _Kept]:
    found, roots = dict[tuple[SaveId, str], _Kept](), roots_of(arena)
    for name in names_in(arena / KEPT):
        place = arena / KEPT / name
        for rank, done in slots.read_parts(place).items():
            if kept_place(arena, done.id, attempt := _attempt(done.details)) != place:
                continue
            kept = found.setdefault((done.id, attempt), _Kept(digests=slots.read_digests(place, done.id)))
            kept.parts[rank] = done
            # A rank's record names all of its files; those that are large, or that each node has, are not kept here.
            for at in [root / KEPT / name for root in roots]:
                kept.roots |= {file: at for file, size in done.files.items() if not slots.damage(at, {file: size})}
    return found


def _of_slot(slot: Path) -> HeldSave | None:
    records = slots.read(slot)
    if records.committed is None or records.begin is None:
        return None
    dones = [records.done[writer] for writer in sorted(records.begin.writers)]
    return HeldSave(
        records.committed,
        _attempt(records.details),
        records.details,
        dict.fromkeys(records.files, slot),
        records.files,
        records.digests,
        {done.details["rank"]: done for done in dones if "rank" in done.details},
        slot,
        frozenset(records.common),
    )


def _joined(own: HeldSave, kept: _Kept) -> HeldSave:
    files = {name: size for done in kept.parts.values() for name, size in done.files.items() if name in kept.roots}
    return replace(
        own,
        roots=kept.roots | dict(own.roots),
        sizes=files | dict(own.sizes),
        digests=kept.digests | dict(own.digests),
        parts=kept.parts | dict(own.parts),
    )


def _attempt(details: Mapping[str, Any]) -> str:
    return str(details.get("attempt", ""))
