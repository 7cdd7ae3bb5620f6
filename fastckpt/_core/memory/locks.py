"""Locks on files that speak for one process: they end with it, and its forked children do not hold them."""

import fcntl
import os
import stat
from pathlib import Path

from fastckpt._core.descriptors import close_own, opened

_held: dict[int, tuple[int, int] | None] = {}
"""Opened files by descriptor."""


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, made if need be; to be closed with `close_lock`."""
    return _open(path, os.O_RDWR | os.O_CREAT)


def open_lock_of_others(path: Path) -> int:
    """The same of a lock file that must be there; nothing is written to it."""
    return _open(path, os.O_RDONLY)


def lock_of(fd: int) -> int:
    """A descriptor of the same opening that has the lock for this process alone; to be closed with `close_lock`.

    Raises:
        OSError: Others have it.
    """
    lock = os.dup(fd)
    _held[lock] = opened(lock)
    if not try_exclusive(lock):
        close_lock(lock)
        raise OSError("the file was just made, and is locked already")
    return lock


def _open(path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    _held[fd] = opened(fd)
    return fd


def try_exclusive(fd: int) -> bool:
    """Take the lock for this process alone; False if others have it."""
    return _try(fd, fcntl.LOCK_EX)


def try_shared(fd: int) -> bool:
    """Take the lock together with others; False if somebody has it alone."""
    return _try(fd, fcntl.LOCK_SH)


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_named(fd: int, path: Path) -> bool:
    """Return whether ``path`` still leads to the file that was opened."""
    try:
        named = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == opened(fd)


def close_lock(fd: int) -> None:
    """Give up the lock."""
    close_own(fd, _held.pop(fd, None))


def _forget_in_child() -> None:
    # A flock belongs to all descriptors of one opening; without this, a child that outlives us would keep it.
    for fd, own in _held.items():
        close_own(fd, own)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
