"""The writers of an arena: each signs there and shares a lock, which an adopter must have for itself."""

import errno
import logging
import time
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.error_codes import coded
from fastckpt._core.memory.locks import close_lock, is_named, open_lock, try_exclusive, try_shared
from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.records import names_in, naming, read_record, write_record
from fastckpt.errors import ArenaInUse

logger = logging.getLogger("fastckpt")

LOCK = "writers"
DEADLINE = 30.0
"""Seconds for a writer to share the lock: nobody has it alone for longer than a look takes."""
_SIGNATURE = "writer-"


class Presence:
    """Signs for this process that it may write to the arena, until `close` or its end."""

    def __init__(self, arena: Path) -> None:
        """Sign, then share the lock; raises ArenaInUse if somebody keeps it.

        Where that cannot be, since memory is full or the arena was removed, `renew` will do it before anything is
        written: reading needs no signature.
        """
        self._arena = arena
        self._lock = -1
        self._signature = arena / _SIGNATURE
        try:
            self._enter()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOENT):
                raise
            logger.warning("nothing can be written to %s at the moment: %s", arena, error)

    def _enter(self) -> None:
        self._lock = open_lock(self._arena / LOCK)
        process = Process.current()
        self._signature = self._arena / f"{_SIGNATURE}{process.pid}-{self._lock}"
        try:
            write_record(self._signature, process.to_record())  # first: the holder of the lock can be found
            self._share()
        except (OSError, ArenaInUse):
            self.close()
            raise

    def _share(self) -> None:
        end = time.monotonic() + DEADLINE
        while not self._is_shared():
            if time.monotonic() > end:
                raise ArenaInUse(
                    f"a process keeps {self._arena / LOCK} locked for itself; end it, or remove {self._arena}"
                )
            time.sleep(0.01)

    def _is_shared(self) -> bool:
        with naming(self._arena / LOCK):
            return try_shared(self._lock)

    def renew(self) -> None:
        """Be present in an arena that its owner has made again since; raises OSError or ArenaInUse."""
        if self._lock < 0 or not is_named(self._lock, self._arena / LOCK):
            self.close()
            self._enter()

    def close(self) -> None:
        """Write no more."""
        _remove(self._signature)
        if self._lock >= 0:
            close_lock(self._lock)
            self._lock = -1


def signed(arena: Path) -> list[tuple[Path, Process]]:
    """The signatures of writers that have not deregistered, the dead among them, and their processes."""
    found = [(arena / name, read_record(arena / name)) for name in names_in(arena) if name.startswith(_SIGNATURE)]
    return [(path, process) for path, record in found if (process := Process.from_record(record)) is not None]


def forget_the_dead(arena: Path) -> None:
    """Remove signatures of writers that are gone."""
    for path, process in signed(arena):
        if not process.is_alive():
            _remove(path)


def _remove(signature: Path) -> None:
    """Remove a signature; one that stays does no harm, as it names its process."""
    try:
        signature.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s, the signature of a writer: %s", signature, error)


def evict(arena: Path, seconds: float) -> bool:
    """End the writers that a dead owner left; False if somebody still may write after ``seconds``.

    Call as the arena's owner. It kills only writers that signed, share the lock and run here for this user.
    """
    lock = open_lock(arena / LOCK)
    end = time.monotonic() + seconds
    try:
        if not try_exclusive(lock):
            killed = sorted({process.pid for _, process in signed(arena) if process.kill()})
            if killed:
                metrics.event("orphans_killed", pids=killed)
                logger.warning(
                    coded("killed processes %s, which a dead job left writing to %s", "FC-004"), killed, arena
                )
            while not try_exclusive(lock):
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
        for path, process in signed(arena):
            left = sorted(each.pid for each in process.left() if each.kill())
            if left:
                metrics.event("orphans_killed", pids=left)
                text = coded("killed processes %s, such as loader workers, which %s left behind", "FC-004")
                logger.warning(text, left, process)
            _remove(path)
        return True
    finally:
        close_lock(lock)
