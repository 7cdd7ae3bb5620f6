"""Locks on files that speak for one process: they end with it, and its forked children do not hold them."""

import fcntl
import os
from pathlib import Path

_held: set[int] = set()


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, made if need be; to be closed with `close_lock`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    _held.add(fd)
    return fd


def try_exclusive(fd: int) -> bool:
    """Take the lock for this process alone; False if others have it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_shared(fd: int) -> None:
    """Take the lock together with others."""
    fcntl.flock(fd, fcntl.LOCK_SH)


def close_lock(fd: int) -> None:
    """Give up the lock."""
    _held.discard(fd)
    os.close(fd)


def _forget_in_child() -> None:
    # A flock belongs to all descriptors of one opening; without this, a child that outlives us would keep it.
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
