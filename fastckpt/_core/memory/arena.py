"""Shared memory for one checkpoint directory on one node: a directory on a tmpfs, with one owner."""

import contextlib
import errno
import hashlib
import logging
import os
import re
import resource
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Self

from fastckpt._core.byte_sizes import binary
from fastckpt._core.error_codes import coded
from fastckpt._core.huge_pages import is_in_memory
from fastckpt._core.memory import presence
from fastckpt._core.memory.copies_folder import erase_folder, roots_of
from fastckpt._core.memory.directory_claim import DirectoryClaim
from fastckpt._core.memory.headroom import Headroom, headroom
from fastckpt._core.memory.locks import close_lock, is_named, open_lock, try_exclusive
from fastckpt._core.memory.ownership import OWNER, Owner, make_private, own, refuse
from fastckpt._core.memory.pages import NEVER, allocate, begin, enlarge
from fastckpt._core.memory.processes import boot_id
from fastckpt._core.memory.records import make_folders, names_in, naming, remove_any
from fastckpt._core.memory.slots import discard, image_size
from fastckpt._core.policy.memory_reserve import RESERVE
from fastckpt.errors import ArenaInUse, ArenaTooSmall

logger = logging.getLogger("fastckpt")

_SLOT = "slot-"
_GONE = "removed-"
_NEW = ".begun-"
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_FURTHER = range(1, 8)
"""Names that are tried after the first one."""


def arena_path(shm_dir: str, checkpoint_dir: str, agent_slot: int) -> Path:
    """The path of the arena of a checkpoint directory: the first of its `arena_paths` that no other user has taken.

    An arena that is there counts first: paths before it may have become free since.
    """
    paths = arena_paths(shm_dir, checkpoint_dir, agent_slot)
    owners = [owner_of(path) for path in paths]
    for owner in (os.getuid(), None):
        if owner in owners:
            return paths[owners.index(owner)]
    return paths[0]


def arena_paths(shm_dir: str, checkpoint_dir: str, agent_slot: int) -> list[Path]:
    """Paths that the arena of a checkpoint directory may have, in the order in which they are tried.

    Any user who knows the directory can compute them, and make one first: all may write to a shared tmpfs.

    Args:
        shm_dir: A directory on a tmpfs.
        checkpoint_dir: The checkpoint directory, as a real path.
        agent_slot: Number of its agent among those that share the directory of arenas.
    """
    name = f"{checkpoint_dir}\0{agent_slot}"
    keys = [hashlib.sha256(each.encode()).hexdigest()[:16] for each in (name, *(f"{name}\0{n}" for n in _FURTHER))]
    return [Path(shm_dir) / f"fastckpt-{os.getuid()}-{key}" for key in keys]


def owner_of(path: Path) -> int | None:
    """The user who owns a path; None if nothing is there."""
    try:
        return path.lstat().st_uid
    except OSError:
        return None


class Arena:
    """An arena that this process owns, until `remove` or `release`.

    The lock on its ``owner`` file shows that a process owns it; the file names the process.

    Attributes:
        path: Its directory.
        slots: Its places for checkpoints.
        adopted: True if it had such places when it was opened.
        claim: The identity of its checkpoint directory.
    """

    def __init__(self, path: Path, owner: Owner, lock: int) -> None:
        self.path = path
        self.slots = slots_of(path)
        self.adopted = bool(self.slots)
        self._owner = owner
        self.claim = DirectoryClaim.read(path)
        self._lock = lock
        self._begun: set[tuple[Path, str]] = set()

    @classmethod
    def open(cls, path: Path, checkpoint_dir: str, launch: str = "", wait: Callable[[Owner], None] = refuse) -> Self:
        """Make the arena, or adopt the one that a dead owner left.

        While it has another owner, ``wait`` is called again and again: it takes a moment, or raises.

        Raises:
            ArenaInUse: It has another owner that ``wait`` does not wait for, or it does not belong to this user.
            ArenaTooSmall: There is not even room for its owner's name.
        """
        lock = own(path, wait)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(close_lock, lock)  # else this process would keep it from its own next try
            with naming(path / OWNER):
                former = Owner.read(lock)
            owner = Owner.current(checkpoint_dir, launch, former.and_its_predecessors())
            try:
                owner.sign(lock)
            except OSError as error:
                if not slots_of(path):
                    shutil.rmtree(path, ignore_errors=True)
                found = headroom(path.parent)
                raise ArenaTooSmall(
                    coded(
                        f"nothing can be written under {path.parent}: {error}; {found}. {found.remedies(RESERVE)}.",
                        "FC-001",
                    )
                ) from error
            _remove_strays(path)
            arena = cls(path, owner, lock)
            if former.process is not None and former.process.boot != boot_id():
                logger.warning(
                    "discarding %s, which is of an earlier boot, with its checkpoints of %s", path, checkpoint_dir
                )
                arena.renew()  # its bytes were never meant to outlive the kernel's end
            on_failure.pop_all()
        return arena

    @property
    def ended(self) -> tuple[str, ...]:
        """Launches that owned it until their end; one that has released it may go on."""
        return self._owner.ended

    def is_there(self) -> bool:
        """Return whether the arena is still ours: it may have been removed, and made again by another job."""
        return is_named(self._lock, self.path / OWNER)

    def restore(self) -> None:
        """Make the arena again after somebody has removed it; its saves are lost, but its mappings stay valid.

        Raises OSError or ArenaInUse, and leaves nothing of it: half an arena would pass for one.
        """
        make_private(self.path)
        lock = open_lock(self.path / OWNER)
        if not try_exclusive(lock):
            close_lock(lock)
            raise ArenaInUse(f"{self.path} was removed, and another job has created it again")
        try:
            self._owner.sign(lock)
            self.claim.write(self.path)
            for slot in self.slots:
                slot.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            close_lock(lock)
            raise
        close_lock(self._lock)
        self._lock = lock

    def drop(self, slot: Path) -> None:
        """Give up a slot and its save, at once. Blocks while its memory is given back, about 0.2 s/GiB."""
        gone = slot.with_name(f"{_GONE}{slot.name}")
        slot.rename(gone)  # else somebody might find half of its committed save
        self.slots.remove(slot)
        shutil.rmtree(gone)

    def claim_for(self, mark: str, inode: int = 0) -> bool:
        """Claim the arena for the checkpoint directory of this mark and inode; whether it was that directory's before.

        If the directory has no mark, the claim names the one that it is to get. Saves in memory of a directory that
        was removed since are nobody's, though the new one has its name: `renew` first.
        """
        ours = self.claim.is_of(mark, inode)
        if mark and ours:
            self.saw(mark)
        elif mark:
            self._set(DirectoryClaim(seen=mark, inode=inode))
        elif not (ours and self.claim.due):  # a mark that was seen in it once is never written there again
            self._set(DirectoryClaim(wanted=secrets.token_hex(16), inode=inode))
        return ours

    def saw(self, mark: str) -> None:
        """Know the directory by this mark from now on: ours, or one that another node has made first."""
        if mark != self.claim.seen:
            self._set(replace(self.claim, seen=mark))

    def _set(self, claim: DirectoryClaim) -> None:
        if self.is_there():  # else `restore` will write it
            claim.write(self.path)
        self.claim = claim

    def evict_writers(self, seconds: float) -> bool:
        """End the writers of the former owner; False if one may still write when the time is over."""
        return presence.evict(self.path, seconds)

    def renew(self) -> None:
        """Forget all that is in memory, also where others still write to it.

        They have the old images mapped, and know the old slots by their names: the new ones get others.
        """
        count = len(self.slots)
        first = 1 + max((_number(slot) for slot in self.slots), default=-1)
        for slot in list(self.slots):
            self.drop(slot)
        (self.path / presence.LOCK).unlink(missing_ok=True)
        self._make_slots(first, count)

    def make_slots(self, count: int) -> None:
        """Have at least ``count`` slots; present ones stay."""
        taken = [_number(slot) for slot in self.slots]
        self._make_slots(1 + max(taken, default=-1), max(0, count - len(taken)))

    def _make_slots(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            slot = self.path / f"{_SLOT}{number}"
            slot.mkdir(mode=0o700)
            self.slots.append(slot)

    def reserve(self, slot: Path, name: str, size: int, urgent: threading.Event = NEVER) -> bool:
        """Give a slot an image of ``size`` bytes with all its memory; does nothing if it has it.

        A new size makes a new file: processes that have mapped the old one keep it, whole. Blocks for about 1 s/GB, or
        longer while nobody waits for it (``urgent``). Returns whether it is in large pages, if the kernel has them.

        Raises:
            ArenaTooSmall: The memory ran out since `check`.
            OSError: The arena was removed.
        """
        if image_size(slot, name) == size and self.is_there():
            return True
        temporary, fd = self._open_new(slot, name)
        self._begun.discard((slot, name))
        try:
            is_large = allocate(fd, size, urgent)
        except OSError as error:
            temporary.unlink()
            too_large = file_too_large(name, size) if error.errno == errno.EFBIG else ""
            raise ArenaTooSmall(too_large or too_small(size, 1, headroom(self.path.parent))) from error
        finally:
            os.close(fd)
        temporary.rename(slot / name)
        return is_large

    def begin(self, slot: Path, name: str, size: int, urgent: threading.Event) -> None:
        """Make pages of an image that is to be reserved, in about this size, until somebody waits (``urgent``).

        `reserve` goes on with them. An image of that name in the slot is removed. Raises OSError if there is too
        little memory, or the arena was removed.
        """
        temporary, fd = self._open_new(slot, name)
        self._begun.add((slot, name))
        try:
            begin(fd, size, urgent)
        except OSError:
            temporary.unlink()
            self._begun.discard((slot, name))
            raise
        finally:
            os.close(fd)

    def begun_bytes(self) -> int:
        """Bytes of memory of images that were begun, and are not reserved yet."""
        found = 0
        for slot, name in list(self._begun):
            with contextlib.suppress(OSError):  # it is reserved, or was removed, meanwhile
                found += _new(slot / name).lstat().st_blocks * 512
        return found

    def begun_in(self, slot: Path) -> list[str]:
        """Names of the images of a slot that were begun, and are not reserved yet."""
        return [name for at, name in list(self._begun) if at == slot]

    def abandon(self, slot: Path, names: Collection[str]) -> None:
        """Remove images that were begun, and are not to be reserved."""
        self._begun.difference_update((slot, name) for name in names)
        discard(slot, [str(_new(Path(name))) for name in names])

    def _open_new(self, slot: Path, name: str) -> tuple[Path, int]:
        """Return the path at which a new image gets its pages, and a descriptor of the file; raises OSError."""
        if not self.is_there():
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(self.path))
        path = slot / name
        temporary = _new(path)
        make_folders(self.path, path.parent)
        remove_any(path)
        is_begun = (slot, name) in self._begun and temporary.is_file() and not temporary.is_symlink()
        if not is_begun:  # a file that another process left there may have any content
            remove_any(temporary)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if is_begun else os.O_CREAT | os.O_EXCL)
        return temporary, os.open(temporary, flags, 0o600)

    def enlarge(self, slot: Path, name: str, urgent: threading.Event) -> bool:
        """Move an image into large pages, while others may use it; False if this ended early, as somebody waits.

        Raises OSError if there is no such image any more.
        """
        fd = os.open(slot / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return not is_in_memory(fd) or enlarge(fd, os.fstat(fd).st_size, urgent)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Give the memory back."""
        try:
            if self.is_there():
                erase(self.path)
        finally:
            close_lock(self._lock)

    def release(self) -> None:
        """Leave the memory to the next owner."""
        try:
            if self.is_there():
                # A former owner may still act, a dead one does not: no successor shall take one for the other.
                replace(Owner.read(self._lock), launch="").sign(self._lock)
        finally:
            close_lock(self._lock)


def _new(path: Path) -> Path:
    """Return the path of an image until all its memory is allocated."""
    return path.with_name(f"{_NEW}{path.name}")


def too_small(size: int, slots: int, found: Headroom, copies: int = 0) -> str:
    """The text of an ArenaTooSmall: the needed memory, the free memory, and what to do.

    Args:
        size: Bytes of a checkpoint.
        slots: Number of slots that there must be room for.
        found: The limit that leaves no room; memory of the slots counts as free.
        copies: Bytes of copies of other nodes' files, beside the slots.
    """
    need = slots * size + copies
    fewer = " Or use --fast-slots 2." if slots > 2 else ""
    if copies:
        fewer += " Or keep copies of other hosts' files on a disk (--fast-replica-medium disk:DIR), or none"
        fewer += " (--fast-replicas 0)."
    beside = f" and {binary(copies)} of other hosts' copies" if copies else ""
    return coded(
        f"{found.medium} cannot hold {slots} x {binary(size)}{beside}, {binary(need)} in all: {found}. "
        f"{found.remedies(need - found.free)}.{fewer}",
        "FC-001",
    )


def file_too_large(name: str, size: int) -> str:
    """The text of an ArenaTooSmall for a file of which the process may not write as many bytes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return coded(
        f"{name} has {binary(size)}, and no file of this process may have more than {binary(max(0, limit))}. Raise "
        "that limit before the start: ulimit -f unlimited; h_fsize of Grid Engine.",
        "FC-001",
    )


def erase(path: Path) -> None:
    """Remove an arena, and its copies on a disk, under other names: nobody finds half of it."""
    for folder in reversed(roots_of(path)):
        erase_folder(folder)


def slots_of(arena: Path) -> list[Path]:
    """The slots that are there; a path that only has the name of one is none."""
    found = [arena / name for name in names_in(arena) if name.startswith(_SLOT)]
    return sorted((path for path in found if _number(path) >= 0 and _is_directory(path)), key=_number)


def _number(slot: Path) -> int:
    digits = slot.name.removeprefix(_SLOT)
    return int(digits) if _NUMBER.fullmatch(digits) else -1


def _remove_strays(arena: Path) -> None:
    """Remove other files with names of slots; end the removal of slots that were given up."""
    for name in names_in(arena):
        path = arena / name
        if name.startswith(_GONE) or (name.startswith(_SLOT) and not _is_directory(path)):
            remove_any(path)
        elif name.startswith(_SLOT):
            for begun in [*path.rglob(f"{_NEW}*")]:  # by an owner that has died: its memory would not count as free
                remove_any(begun)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
