"""Lists arenas and telemetry blocks in shared memory, their owners, and those without an owner."""

import enum
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import erase, slots_of
from fastckpt._core.memory.directory_claim import DirectoryClaim
from fastckpt._core.memory.locks import (
    close_lock,
    is_named,
    open_lock,
    open_lock_of_others,
    try_exclusive,
    try_shared,
)
from fastckpt._core.memory.ownership import OWNER, is_private
from fastckpt._core.memory.presence import LOCK, signed
from fastckpt._core.memory.processes import Process, boot_id
from fastckpt._core.memory.records import names_in, read_record
from fastckpt._core.memory.telemetry import BLOCKS, remove_dead, telemetry_name, unlink
from fastckpt.errors import ArenaInUse, FastckptError

logger = logging.getLogger("fastckpt")

_ARENA = re.compile(r"fastckpt-(\d{1,10})-[0-9a-f]{16}(\.(removed|prefetch)-[0-9a-f]{8})?")
_BLOCK = re.compile(rf".+\.{_ARENA.pattern}|fastckpt\.[0-9a-f]{{64}}")


class ArenaState(enum.StrEnum):
    """Ownership of an arena.

    LEFT_BEHIND is nobody's: a launch with its checkpoint directory adopts it. OLD_BOOT is of an earlier boot: worth
    nothing. FOREIGN is another user's, or was not made by us.
    """

    IN_USE = "in use"
    LEFT_BEHIND = "left behind"
    OLD_BOOT = "old boot"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class ArenaEntry:
    """An arena, or the telemetry block of one that is gone.

    Attributes:
        path: Its path.
        state: State of its ownership.
        uid: The user who owns it.
        size: Bytes of memory that it takes; 0 if it is foreign.
        directory: The checkpoint directory; empty if that is not known.
        claim: The identity of that directory: its mark (`.fastckpt/identity`), or the one that it is to get.
        owner: Present or former owner; None if it is not known.
        writers: Writers that are alive.
        slots: Committed save of each slot, by the slot's name; None for none.
    """

    path: Path
    state: ArenaState
    uid: int
    size: int = 0
    directory: str = ""
    claim: DirectoryClaim = field(default_factory=DirectoryClaim)
    owner: Process | None = None
    writers: tuple[Process, ...] = ()
    slots: dict[str, SaveId | None] = field(default_factory=dict)

    @property
    def is_arena(self) -> bool:
        """True for an arena, False for a telemetry block."""
        return _ARENA.fullmatch(self.path.name) is not None

    @property
    def newest(self) -> SaveId | None:
        """The newest checkpoint that it holds whole; None if it holds none."""
        return max((save for save in self.slots.values() if save is not None), default=None)


def census(shm_dir: Path) -> list[ArenaEntry]:
    """All arenas under ``shm_dir``, and this user's telemetry blocks without an arena; changes nothing.

    Raises:
        OSError: The directory cannot be listed.
    """
    arenas = [_arena(path) for path in sorted(shm_dir.iterdir()) if _ARENA.fullmatch(path.name)]
    return [entry for entry in (*arenas, *_stray_blocks(shm_dir)) if entry is not None]


def clean(entry: ArenaEntry, *, force: bool = False) -> None:
    """Remove an arena or block without an owner.

    Args:
        entry: Entry of `census`.
        force: Remove it also if it holds a whole checkpoint. Give it for one that storage has, or that nobody wants.

    Raises:
        ArenaInUse: It is somebody's, or changed since the census.
        FastckptError: It holds a checkpoint, and ``force`` was not given.
    """
    if entry.state in (ArenaState.IN_USE, ArenaState.FOREIGN):
        raise ArenaInUse(f"{entry.path} is {entry.state}; it is not removed")
    if entry.newest is not None and not force:
        raise FastckptError(
            f"{entry.path} holds {entry.newest} of {entry.directory}, which may be nowhere else; a launch with that "
            f"checkpoint directory resumes from it. Force its removal if nobody needs it."
        )
    with ExitStack() as locks:
        if not entry.is_arena:
            _lock(open_lock_of_others(entry.path), entry.path, locks)
            unlink(entry.path.name)
            return
        # An owner takes them in this order too, and tries again when it finds one taken.
        owner = _lock(open_lock(entry.path / OWNER), entry.path, locks)
        _lock(open_lock(entry.path / LOCK), entry.path, locks)
        now = _arena(entry.path, locked=True)
        if now is None or now.newest != entry.newest or not is_named(owner, entry.path / OWNER):
            raise ArenaInUse(f"{entry.path} was used since it was looked at; it is not removed")
        erase(entry.path)
        unlink(telemetry_name(entry.path))


def sweep(shm_dir: Path) -> None:
    """Remove this user's arenas of earlier boots, and half-removed arenas of a process that died.

    It also removes telemetry blocks of dead owners, wherever they had their arenas: nobody else would remove the block
    of an owner with a place of its own.
    """
    for name in names_in(BLOCKS):
        if _BLOCK.fullmatch(name):
            remove_dead(BLOCKS / name)
    with suppress(OSError):
        for entry in census(shm_dir):
            worthless = entry.state is ArenaState.OLD_BOOT or (
                entry.state is ArenaState.LEFT_BEHIND and entry.is_arena and entry.path.suffix
            )
            if worthless:
                with suppress(FastckptError, OSError):
                    clean(entry, force=True)
                    level = logging.INFO if entry.newest is None else logging.WARNING
                    held = "nothing whole" if entry.newest is None else f"{entry.newest} of {entry.directory}"
                    logger.log(level, "removed %s, which nobody owns (%s); it held %s", entry.path, entry.state, held)


def _lock(lock: int, path: Path, locks: ExitStack) -> int:
    locks.callback(close_lock, lock)
    if not try_exclusive(lock):
        raise ArenaInUse(f"{path} is in use; it is not removed")
    return lock


def _arena(path: Path, *, locked: bool = False) -> ArenaEntry | None:
    """The arena at ``path``, of which the caller may have all locks; None if it is gone."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not is_private(status):
        return ArenaEntry(path, ArenaState.FOREIGN, status.st_uid)
    record = read_record(path / OWNER)
    owner = Process.from_record(record)
    return ArenaEntry(
        path,
        ArenaState.IN_USE if not locked and _is_in_use(path) else _unowned(owner),
        status.st_uid,
        _memory(path),
        str(record.get("directory", "")),
        DirectoryClaim.read(path),
        owner,
        tuple(process for _, process in signed(path) if process.is_alive()),
        {slot.name: _held(slot) for slot in slots_of(path)},
    )


def _is_in_use(arena: Path) -> bool:
    # The owner has its lock alone, the writers share theirs. A process that is just opening an arena tries again.
    return _is_locked(arena / OWNER, try_shared) or _is_locked(arena / LOCK, try_exclusive)


def _is_locked(path: Path, take: Callable[[int], bool]) -> bool:
    try:
        lock = open_lock_of_others(path)
    except OSError:
        return False
    try:
        return not take(lock)
    finally:
        close_lock(lock)


def _unowned(owner: Process | None) -> ArenaState:
    return ArenaState.OLD_BOOT if owner is not None and owner.boot != boot_id() else ArenaState.LEFT_BEHIND


def _held(slot: Path) -> SaveId | None:
    records = slots.read(slot)
    return records.committed if records.committed and not slots.damage(slot, records.files) else None


def _memory(path: Path) -> int:
    """Bytes of memory of all files at or below ``path``, as far as they can be seen."""
    files = [path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names)]
    return sum(_blocks_of(file) for file in files)


def _blocks_of(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except OSError:
        return 0


def _stray_blocks(shm_dir: Path) -> Iterator[ArenaEntry]:
    """Telemetry blocks of this user without an arena under ``shm_dir``."""
    prefix = telemetry_name(shm_dir / f"fastckpt-{os.getuid()}-").strip("/")
    for name in names_in(BLOCKS):
        key = name.removeprefix(prefix)
        path, arena = BLOCKS / name, shm_dir / f"fastckpt-{os.getuid()}-{key}"
        if name == key or not _ARENA.fullmatch(arena.name) or arena.exists():
            continue
        with suppress(FileNotFoundError):  # its job has just ended
            uid = path.lstat().st_uid
            state = ArenaState.IN_USE if _is_locked(path, try_exclusive) else ArenaState.LEFT_BEHIND
            yield ArenaEntry(path, state if uid == os.getuid() else ArenaState.FOREIGN, uid, _memory(path))
