"""Shared memory for one checkpoint directory on one node: a directory on a tmpfs, with one owner."""

import hashlib
import json
import os
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import Self

import psutil

from fastckpt.errors import ArenaInUse, ArenaTooSmall
from fastckpt.memory.headroom import headroom
from fastckpt.memory.locks import close_lock, open_lock, take_shared, try_exclusive

FORKS_DEADLINE = 5.0
"""Seconds in which a child that a dead owner had just forked lets go of its locks."""
_OWNER, _WRITERS, _IDENTITY = "owner", "writers", "identity"


def arena_path(shm_dir: str, checkpoint_dir: str, node_slot: int) -> Path:
    """Where the arena of a checkpoint directory lies.

    Args:
        shm_dir: A directory on a tmpfs.
        checkpoint_dir: The checkpoint directory, as a real path.
        node_slot: Which of the agents that share this host and checkpoint directory it belongs to.
    """
    key = hashlib.sha256(f"{checkpoint_dir}\0{node_slot}".encode()).hexdigest()[:16]
    return Path(shm_dir) / f"fastckpt-{os.getuid()}-{key}"


class Arena:
    """An arena that this process owns, until `remove` or `release`.

    The lock on its ``owner`` file says that somebody owns it; the file says who.
    """

    def __init__(self, path: Path, checkpoint_dir: str, lock: int, adopted: bool) -> None:
        self.path = path
        self.adopted = adopted
        self.slots: list[Path] = sorted(path.glob("slot-*"))
        self._checkpoint_dir = checkpoint_dir
        self._claim = ""
        self._lock = lock

    @classmethod
    def open(cls, path: Path, checkpoint_dir: str) -> Self:
        """Make the arena, or adopt the one that a dead owner left.

        Raises:
            ArenaInUse: Its owner is alive, or it does not belong to this user.
        """
        end = time.monotonic() + FORKS_DEADLINE
        while True:
            _make_private(path)
            lock = open_lock(path / _OWNER)
            if not try_exclusive(lock):
                owner = os.pread(lock, 4096, 0).decode(errors="replace")
                close_lock(lock)
                if not _is_alive(owner) and time.monotonic() < end:
                    time.sleep(0.01)
                    continue
                raise ArenaInUse(
                    f"checkpoint directory {checkpoint_dir} is in use by another job on this host: {owner}. End that "
                    f"job, or give this one another checkpoint directory."
                )
            if _is_named(lock, path / _OWNER):
                break
            close_lock(lock)  # the former owner removed it between our open and our lock
        adopted = os.fstat(lock).st_size > 0
        _sign(lock, checkpoint_dir)
        return cls(path, checkpoint_dir, lock, adopted)

    def restore(self) -> None:
        """Make the arena anew after somebody has removed it; what it held is lost, but its mappings stay valid."""
        _make_private(self.path)
        lock = open_lock(self.path / _OWNER)
        if not try_exclusive(lock):
            close_lock(lock)
            raise ArenaInUse(f"{self.path} was removed, and another job has made it anew")
        _sign(lock, self._checkpoint_dir)
        (self.path / _IDENTITY).write_text(self._claim)
        close_lock(self._lock)
        self._lock = lock
        for slot in self.slots:
            slot.mkdir(mode=0o700, exist_ok=True)

    def drop(self, slot: Path) -> None:
        """Give up a slot; what it holds is lost."""
        shutil.rmtree(slot)
        self.slots.remove(slot)

    def claim_for(self, identity: str) -> bool:
        """Mark the arena as one of the checkpoint directory of this identity; whether it was that before.

        What is in memory for a directory that was removed since is nobody's, though the new one has its name.
        """
        mark = self.path / _IDENTITY
        before = mark.read_text() if mark.exists() else ""
        mark.write_text(identity)
        self._claim = identity
        return bool(identity) and before == identity

    def wait_for_writers(self, seconds: float) -> bool:
        """Wait until no writer of the former owner is left; False if one still is when the time is over."""
        lock = open_lock(self.path / _WRITERS)
        end = time.monotonic() + seconds
        try:
            while not try_exclusive(lock):
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
            return True
        finally:
            close_lock(lock)

    def make_slots(self, count: int) -> None:
        """Have at least ``count`` slots; those that are there stay."""
        for i in range(count):
            (self.path / f"slot-{i}").mkdir(mode=0o700, exist_ok=True)
        self.slots = sorted(self.path.glob("slot-*"))

    def reserve(self, slot: Path, name: str, size: int) -> None:
        """Give a slot an image of ``size`` bytes whose memory is all there; does nothing if it has it.

        A new size makes a new file: who has mapped the old one keeps it, whole. Blocks for about 1 s/GB.

        Raises:
            ArenaTooSmall: The memory ran out since `check`.
        """
        path, temporary = slot / name, slot / f".new-{name}"
        if path.exists() and path.stat().st_size == size:
            return
        path.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            temporary.unlink()
            raise ArenaTooSmall(too_small(self.path, size, 1, str(headroom(self.path)))) from error
        finally:
            os.close(fd)
        temporary.rename(path)

    def remove(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.path, ignore_errors=True)
        close_lock(self._lock)

    def release(self) -> None:
        """Leave the memory to whoever adopts it."""
        close_lock(self._lock)


def too_small(path: Path, size: int, slots: int, free: str) -> str:
    """The text of an ArenaTooSmall: what is needed, what there is, and what to do."""
    return (
        f"shared memory cannot hold {slots} x {size / 2**30:.2f} GiB under {path.parent}: {free}. Enlarge it (docker: "
        f"--shm-size; a memory limit: raise it), choose another tmpfs with --fast-shm-dir, or use --fast-slots 2."
    )


def hold_writers_lock(arena: Path) -> int:
    """Tell adopters of the arena that this process may write to it, until it calls `close_lock`."""
    lock = open_lock(arena / _WRITERS)
    take_shared(lock)
    return lock


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ArenaInUse(
            f"{path} is not a private directory of this user (mode {status.st_mode:o}, owner {status.st_uid}); "
            f"remove it, or choose another tmpfs with --fast-shm-dir"
        )


def _is_named(fd: int, path: Path) -> bool:
    try:
        named, opened = path.stat(follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _is_alive(owner: str) -> bool:
    try:
        identity = json.loads(owner)
        return bool(psutil.Process(identity["pid"]).create_time() == identity["started"])
    except (ValueError, TypeError, KeyError, psutil.Error):
        return False


def _sign(lock: int, checkpoint_dir: str) -> None:
    """Say in the owner's file who owns the arena, and for what."""
    owner = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "host": socket.gethostname(),
        "directory": checkpoint_dir,
    }
    os.truncate(lock, 0)
    os.pwrite(lock, json.dumps(owner).encode(), 0)
