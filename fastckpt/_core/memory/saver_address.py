"""The address at which workers of a launch without an agent find the saver of their node."""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fastckpt._core.error_codes import coded
from fastckpt._core.io.regular_file import read_small
from fastckpt._core.memory.headroom import headroom
from fastckpt._core.memory.locks import (
    close_lock,
    is_named,
    open_lock,
    open_lock_of_others,
    try_exclusive,
    try_shared,
)
from fastckpt._core.memory.records import names_in
from fastckpt.errors import AgentLost, ArenaTooSmall, FastckptError

FIND_TIMEOUT = 60.0
"""Seconds to find the saver: the first local rank has to start it."""
POST_TIMEOUT = 5.0
"""Seconds to get the lock of a file that was just made: others only look whether somebody has it."""
_PAUSE = 0.01


class SaverAddress:
    """A saver's address in a file of this user, which it has locked as long as it lives.

    Another user can take first any name that they can guess: an abstract address, the name of a directory. So the
    address is drawn by chance, and the file that has it counts by its owner, not by its name.
    """

    def __init__(self, shm_dir: Path, key: str, address: str) -> None:
        """Post the address for the workers of the launch that ``key`` names.

        Raises FastckptError if another live saver of this user has posted one, and OSError if there is no such place.
        """
        _remove_the_dead(shm_dir)
        self._path, self._lock = _locked(shm_dir, key)
        try:
            os.write(self._lock, f"{self._path.name} {address}".encode())
        except OSError as error:
            self.close()
            raise ArenaTooSmall(
                coded(
                    f"nothing can be written under {shm_dir}: {error}; {headroom(shm_dir)}. Free some of it, enlarge "
                    f"it (docker: --shm-size), or choose another tmpfs with --fast-shm-dir.",
                    "FC-001",
                )
            ) from error
        if others := [path for path in _posted(shm_dir, key) if path != self._path and _is_held(path)]:
            self.close()
            raise FastckptError(
                f"{others[0]} was posted by the saver of another job of this user, which seems to have the same "
                f"MASTER_ADDR and MASTER_PORT; give this one others, or start it with fastckpt-run."
            )

    def close(self) -> None:
        """Be found no more."""
        self._path.unlink(missing_ok=True)
        close_lock(self._lock)


def find(shm_dir: Path, key: str, seconds: float = FIND_TIMEOUT) -> str:
    """The address that the live saver of a launch has posted; raises AgentLost if none has after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        for path in _posted(shm_dir, key):
            if _is_held(path) and (address := _address(path)):
                return address
        if time.monotonic() > end:
            raise AgentLost(
                f"the first local rank has posted no address under {shm_dir} in {seconds:g} s; it does so with its "
                f"first checkpointer. See whether it has made one, and has the same FASTCKPT_SHM_DIR."
            )
        time.sleep(_PAUSE)


def _prefix(key: str) -> str:
    return f"fastckpt-{os.getuid()}-saver-{key}"


def _posted(shm_dir: Path, key: str = "") -> Iterator[Path]:
    """The files of this user that have the name of a posting; files of others are passed over."""
    for name in names_in(shm_dir):
        if name.startswith(_prefix(key)) and _is_ours(shm_dir / name):
            yield shm_dir / name


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


def _is_held(path: Path) -> bool:
    try:
        lock = open_lock_of_others(path)
    except OSError:
        return False
    try:
        return not try_shared(lock)
    finally:
        close_lock(lock)


def _address(path: Path) -> str:
    """Return the address that was posted there; "" for nothing yet, or for a link to another posting."""
    try:
        name, _, address = read_small(path).decode(errors="replace").partition(" ")
    except OSError:
        return ""
    return address if name == path.name else ""


def _locked(shm_dir: Path, key: str) -> tuple[Path, int]:
    end = time.monotonic() + POST_TIMEOUT
    while True:
        path = shm_dir / f"{_prefix(key)}-{secrets.token_hex(8)}"
        lock = open_lock(path)
        if try_exclusive(lock) and is_named(lock, path):
            return path, lock
        path.unlink(missing_ok=True)
        close_lock(lock)
        if time.monotonic() > end:
            raise FastckptError(
                f"{path} was locked by another process of this user in {POST_TIMEOUT:g} s, again and again"
            )


def _remove_the_dead(shm_dir: Path) -> None:
    """Remove postings of savers that were killed; a saver that is about to lock its own makes another."""
    for path in _posted(shm_dir):
        with contextlib.suppress(OSError):
            lock = open_lock_of_others(path)
            if try_exclusive(lock):
                path.unlink(missing_ok=True)
            close_lock(lock)
