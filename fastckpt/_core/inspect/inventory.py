"""Inventory of a checkpoint directory in all tiers: the whole checkpoints, and the others with the reason."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from fastckpt._core.format.completeness import lacks, missing_of
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import METADATA, NAME
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import slots_of
from fastckpt._core.memory.census import ArenaEntry, ArenaState, census
from fastckpt._core.policy.resume import TIERS
from fastckpt._core.storage.local.foreign_files import ForeignFiles, foreign
from fastckpt._core.storage.local.identity import DirectoryIdentity
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.stored import Stored, ours, read_manifest
from fastckpt._core.storage.reading import read_text
from fastckpt._core.storage.store import StoredCheckpoint, as_path, is_url, normalised, open_store
from fastckpt.errors import BadCheckpoint, ConfigError

WHOLE, WRITING, INCOMPLETE = "whole", "writing", "incomplete"
DAMAGED, QUARANTINED, FOREIGN = "damaged", "quarantined", "foreign"
_NUMBERS = re.compile(r"(?:quarantine-)?(?:checkpoint-)?(?:(?P<history>\d{1,19})-)?(?P<step>\d{1,19})(?:-[0-9a-f]+)?")
_URL = re.compile(r"checkpoint-(?P<step>\d{1,19})/(?P<history>\d{1,19})-[^/]*$")
_ID = re.compile(r"step (?P<step>\d{1,19}) of history (?P<history>\d{1,19}): ")


@dataclass(frozen=True)
class InventoryFile:
    """One file of a checkpoint: its path or URL, and its recorded size and digest ("" for none).

    Of a ``.metadata`` of DCP, ``parts`` are the files that it describes, by name.
    """

    path: Path | str
    size: int
    digest: str = ""
    parts: Mapping[str, "InventoryFile"] = field(default_factory=dict, compare=False)

    @property
    def has_parts(self) -> bool:
        """Return whether it describes a state that is stored in other files."""
        return PurePath(self.path).name == METADATA

    @property
    def whole_size(self) -> int:
        """Bytes of the file and its parts."""
        return self.size + sum(part.size for part in self.parts.values())


@dataclass(frozen=True)
class InventoryItem:
    """A checkpoint, or the remains of one, in one tier.

    Attributes:
        tier: One of `TIERS`.
        state: WHOLE; WRITING: not yet whole; INCOMPLETE: files of some ranks are missing, it does not count; DAMAGED:
            seen to be bad; QUARANTINED: moved there since it was bad; FOREIGN: memory of a directory that was removed
            since.
        why: Reason why it is not whole.
        path: Its path or URL.
        step: The step; None if unknown.
        history: Its history; None if unknown.
        files: Its files, by name.
        time: Time of its completion, in seconds since the epoch; None if unknown.
        world: Ranks of the job that saved it.
        details: Other values kept with it.
        unchanged: Returns whether it is still as found: its job may take a slot for another save, and delete files
            on storage, at any time.
        parent: The checkpoint that its history was resumed from, as far as that is known.
    """

    tier: str
    state: str
    why: str
    path: Path | str
    step: int | None = None
    history: int | None = None
    files: Mapping[str, InventoryFile] = field(default_factory=dict)
    time: float | None = None
    world: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    unchanged: Callable[[], bool] = field(default=lambda: True, compare=False)
    parent: SaveId | None = None

    @property
    def id(self) -> SaveId | None:
        """History and step; None if unknown."""
        return None if self.step is None or self.history is None else SaveId(self.history, self.step)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def age_order(self) -> tuple[int, int, int]:
        """The newest id first, and of it the nearest tier; unknown ones last."""
        known = (-1, -1) if self.step is None else (-1 if self.history is None else self.history, self.step)
        return (-known[0], -known[1], TIERS.index(self.tier))


@dataclass(frozen=True)
class Inventory:
    """The checkpoints of a directory, newest first, and the arenas that hold those in memory."""

    location: str
    items: list[InventoryItem]
    arenas: list[ArenaEntry]

    @property
    def whole(self) -> list[InventoryItem]:
        """The checkpoints that count."""
        return [item for item in self.items if item.state == WHOLE]

    @property
    def in_use(self) -> list[ArenaEntry]:
        """The arenas of live jobs."""
        return [arena for arena in self.arenas if arena.state is ArenaState.IN_USE]

    @property
    def foreign(self) -> list[ForeignFiles]:
        """Checkpoints that something else wrote, where there is none of ours; none at a URL, which is not searched."""
        return [] if self.items or is_url(self.location) else foreign(Path(self.location))


def take(location: str, shm_dir: str, remote: str = "") -> Inventory:
    """Look at a checkpoint directory in all tiers; reads no tensors, takes no locks, changes nothing.

    Args:
        location: The checkpoint directory: a path or URL.
        shm_dir: The tmpfs that holds arenas.
        remote: Store to which its job copies durable checkpoints; empty for none. If it is given, the directory may be
            gone.

    Raises:
        ConfigError: There is no such directory.
        PersistError: It cannot be read.
    """
    location = as_path(location)
    if not is_url(location) and not (location and (Path(location).is_dir() or (remote and is_gone(location)))):
        hint = "" if remote else "; if it is lost, give --remote as well: where its job copied checkpoints to"
        raise ConfigError(f"{location or 'nothing'} is no directory; give a checkpoint directory{hint}")
    location = normalised(location)
    arenas = [arena for arena in _census(Path(shm_dir)) if arena.directory == location]
    items = [*(_in_memory(arenas, _identity(location)) if arenas else ()), *_durable(location, "storage")]
    if remote:
        items += _durable(normalised(remote), "remote")
    return Inventory(location, sorted(items, key=lambda item: item.age_order), arenas)


def is_gone(location: str) -> bool:
    """Return whether there is nothing at a path; a URL is never gone."""
    return not is_url(location) and not os.path.lexists(as_path(location))


def place_of(location: str) -> Path | str:
    """A location as a path, or as a URL if it is one."""
    return location if is_url(location) else Path(as_path(location))


# --- storage


def _durable(location: str, tier: str) -> list[InventoryItem]:
    with closing(open_store(location)) as store:
        scan = store.scan()
    items = [_stored(stored) for stored in scan.distinct]
    items += [_bad(DAMAGED, path, why) for path, why in scan.damaged]
    items += [_bad(QUARANTINED, path, why) for path, why in scan.quarantined]
    if not is_url(location):
        items += _being_gathered(Path(location))
    return [replace(item, tier=tier) for item in items]


def _stored(stored: StoredCheckpoint) -> InventoryItem:
    manifest = stored.manifest
    missing = missing_of(manifest)
    return InventoryItem(
        tier="storage",
        state=INCOMPLETE if missing else WHOLE,
        why=lacks(missing, manifest.world_size) if missing else "",
        path=stored.path,
        step=manifest.id.step,
        history=manifest.id.history,
        files={
            entry.name: InventoryFile(_where(stored, entry.name), entry.size, entry.digest) for entry in manifest.files
        },
        time=manifest.time,
        world=manifest.world_size,
        details=manifest.details,
        unchanged=lambda: _is_there(stored),
        parent=manifest.parent,
    )


def _is_there(stored: StoredCheckpoint) -> bool:
    if isinstance(stored, Stored):
        return ours(stored.place) == stored.manifest
    return read_text(str(stored.place), NAME) is not None


def _where(stored: StoredCheckpoint, name: str) -> Path | str:
    return stored.path_of(name) if isinstance(stored, Stored) else f"{stored.place}/{name}"


def _bad(state: str, path: Path | str, why: str) -> InventoryItem:
    if isinstance(path, str):
        match = _URL.search(path)
        step, history = (int(match[n]) if match else None for n in ("step", "history"))
        return InventoryItem("storage", state, why, path, step, history)
    try:
        manifest = read_manifest(path)
    except BadCheckpoint:
        manifest = None
    if manifest is not None:
        files = {entry.name: InventoryFile(path / entry.name, entry.size, entry.digest) for entry in manifest.files}
        id, time, world = manifest.id, manifest.time, manifest.world_size
        return InventoryItem("storage", state, why, path, id.step, id.history, files, time, world, manifest.details)
    match = _ID.match(why) or _NUMBERS.fullmatch(path.name)
    step, history = (int(match[n]) if match and match[n] else None for n in ("step", "history"))
    return InventoryItem("storage", state, why, path, step, history)


def _being_gathered(directory: Path) -> Iterator[InventoryItem]:
    """Checkpoints of which some nodes have written their parts and others have not yet."""
    for id, path in Layout(directory).parts():
        nodes = sorted(part.stem.removeprefix("part-") for part in path.glob("part-*.json"))
        why = (
            f"other nodes than {', '.join(nodes)} have not written their parts yet" if nodes else "no node is done yet"
        )
        yield InventoryItem("storage", WRITING, why, path, id.step, id.history)


# --- memory


def _census(shm_dir: Path) -> list[ArenaEntry]:
    try:
        return census(shm_dir)
    except FileNotFoundError:  # also if it goes away meanwhile; asking first would not see that
        return []


def _identity(location: str) -> DirectoryIdentity:
    with closing(open_store(location)) as store:
        return store.identity()


def _in_memory(arenas: list[ArenaEntry], identity: DirectoryIdentity) -> Iterator[InventoryItem]:
    for arena in arenas:
        for slot in slots_of(arena.path):
            item = _slot(slot, ours=arena.claim.is_of(*identity))
            if item is not None:
                yield item


def _slot(slot: Path, *, ours: bool) -> InventoryItem | None:
    """The checkpoint in a slot, read while its owner may be at work; None if there is none."""
    for _ in range(10):
        before = slots.read(slot)
        item = _of_records(slot, before, ours=ours)
        if slots.read(slot) == before:
            break
    return item


def _of_records(slot: Path, records: slots.Records, *, ours: bool) -> InventoryItem | None:
    if records.begin is None:
        return None
    id, world = records.begin.id, None
    files: dict[str, InventoryFile] = {}
    details: dict[str, Any] = {}
    if records.committed is not None:
        files = {
            name: InventoryFile(slot / name, size, records.digests.get(name, ""))
            for name, size in records.files.items()
        }
        details = records.details
        world = details["world_size"] if type(details.get("world_size")) is int else None
    state, why = _verdict(slot, records, ours=ours)

    def unchanged() -> bool:
        now = slots.read(slot)
        return (now.begin, now.done) == (records.begin, records.done)

    return InventoryItem("memory", state, why, slot, id.step, id.history, files, _time(slot), world, details, unchanged)


def _verdict(slot: Path, records: slots.Records, *, ours: bool) -> tuple[str, str]:
    if records.begin is not None and records.committed is None:
        done = {writer for writer, record in records.done.items() if record.id == records.begin.id}
        missing = ", ".join(map(str, sorted(records.begin.writers - done)))
        return WRITING, f"local rank {missing} has not saved its part yet"
    if not ours:
        return FOREIGN, "memory of a directory of this name that was removed since"
    why = slots.damage(slot, records.files)
    return (DAMAGED, why) if why else (WHOLE, "")


def _time(slot: Path) -> float | None:
    """The time at which the last record of a slot was written."""
    times = []
    for path in [*slot.glob(".done-*"), slot / ".begin"]:
        try:
            times.append(path.lstat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)
