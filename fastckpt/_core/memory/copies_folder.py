"""The folder on a disk in which a node keeps large files of other nodes' ranks, if it does not keep them in its arena.

Its name is unique, and the arena has a record of it: by that workers find its files, and so does a later owner of the
arena. Nothing is flushed to the disk: the files outlive processes, as an arena does, and not the host.
"""

import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fastckpt._core.error_codes import coded
from fastckpt._core.io.regular_file import LARGEST
from fastckpt._core.memory.headroom import Headroom, lies_in_memory
from fastckpt._core.memory.locks import close_lock, is_named, open_lock, open_lock_of_others, try_exclusive
from fastckpt._core.memory.ownership import OWNER, is_private, make_private, write_signed
from fastckpt._core.memory.processes import Process, boot_id
from fastckpt._core.memory.records import names_in, parse_record, read_record, remove_any, write_record
from fastckpt.errors import ArenaInUse, ArenaTooSmall

logger = logging.getLogger("fastckpt")
notices = logging.getLogger("fastckpt.report")
"""Logger for lines that are shown though nothing is wrong."""

RECORD = "copies.json"
"""The record of an arena that names its folders."""
_FOLDER = re.compile(r"(fastckpt-(\d{1,10})-[0-9a-f]{16})\.(copies|removed)-[0-9a-f]{8}")
_GRACE = 60.0
"""Seconds that a folder may lack its owner's record: it is being made."""


class CopiesFolder:
    """Folder for the large copies of an arena; any thread may use it.

    Args:
        arena: The arena, which the caller owns.
        directory: The directory of the user's in which the folder is to be; None if the arena itself has the copies.

    Attributes:
        path: The folder, or the arena. It is made by `ensure`.
        is_memory: True if its files take memory.
        former: Folders of earlier owners that were given another directory: they are read, and nothing comes to them.
    """

    def __init__(self, arena: Path, directory: Path | None = None) -> None:
        self._arena, self._directory = arena, directory
        self._mutex, self._lock, self._failed = threading.Lock(), -1, ""
        known = folders_of(arena)
        if gone := [path for path in _named(arena) if path not in known]:
            logger.warning("copies of other hosts' files that were under %s are gone", ", ".join(map(str, gone)))
        self.path, self.is_memory = arena, True
        if directory is not None:
            self.path = directory / f"{arena.name}.copies-{secrets.token_hex(4)}"
            self.path = next((path for path in known if path.parent == directory), self.path)
            self.is_memory = lies_in_memory(directory)
        self.former = [path for path in known if path != self.path]

    @property
    def roots(self) -> list[Path]:
        """All that may have copies: the arena, and folders."""
        return list(dict.fromkeys([self._arena, *self.former, self.path]))

    def ensure(self) -> None:
        """Have the folder; raises ArenaTooSmall if there can be none now, as its directory was removed."""
        if self._directory is None:
            return
        with self._mutex:
            try:
                if not is_named(self._lock, self.path / OWNER):
                    self._make()
                if self.path not in folders_of(self._arena):
                    self._write([*self.former, self.path])
                if self._failed:
                    notices.info("copies of other hosts' files are kept in %s again", self._directory)
                self._failed = ""
            except (OSError, ArenaInUse) as error:
                why = f"no copies can be kept in {self._directory}: {error}"
                if why != self._failed:
                    text = "%s. Make it again, or name another with --fast-replica-medium disk:DIR"
                    logger.warning(coded(text, "FC-045"), why)
                self._failed = why
                raise ArenaTooSmall(why) from error

    def remedies(self, room: Headroom, lacking: int) -> str:
        """Return what a user can do to make room for ``lacking`` bytes more."""
        if self._directory is None:
            return f"{room.remedies(lacking)}, or keep copies on a disk: --fast-replica-medium disk:DIR"
        return "Free some of it, or name a directory with more room: --fast-replica-medium disk:DIR"

    def forget_former(self, is_needed: Callable[[Path], bool]) -> None:
        """Remove folders of earlier owners that are not needed any more."""
        with self._mutex:
            done = [path for path in self.former if not is_needed(path)]
            self.former = [path for path in self.former if path not in done]
            if done:
                with suppress(OSError):  # the arena was removed, and its record with it
                    self._write([*self.former, *([self.path] if self._lock >= 0 else [])])
        for path in done:
            erase_folder(path)

    def close(self) -> None:
        """Leave it to the arena's next owner, or to its removal."""
        with self._mutex:
            if self._lock >= 0:
                close_lock(self._lock)
            self._lock = -1

    def _make(self) -> None:
        make_private(self.path)
        lock = open_lock(self.path / OWNER)
        try:
            if not try_exclusive(lock):
                raise ArenaInUse(f"{self.path} has another owner")
            write_signed(lock, {"arena": str(self._arena), **Process.current().to_record()})
            if not is_named(lock, self.path / OWNER):
                raise FileNotFoundError(f"{self.path} was removed")
        except BaseException:
            close_lock(lock)
            raise
        if self._lock >= 0:
            close_lock(self._lock)
        self._lock = lock
        kind = ", which is a tmpfs: they take memory, and count as such" if self.is_memory else ""
        logger.info("large copies of other hosts' files are kept in %s%s", self.path, kind)

    def _write(self, folders: list[Path]) -> None:
        if folders:
            write_record(self._arena / RECORD, {"folders": [*map(str, folders)]})
        else:
            remove_any(self._arena / RECORD)


def roots_of(arena: Path) -> list[Path]:
    """The directories with an arena's copies of other nodes' files: itself, and its folders on disks."""
    return [arena, *folders_of(arena)]


def folders_of(arena: Path) -> list[Path]:
    """The folders on disks that an arena names, and that are this user's alone."""
    return [path for path in _named(arena) if _is_private(path)]


def _named(arena: Path) -> list[Path]:
    match read_record(arena / RECORD):
        case {"folders": [*folders]}:
            found = [Path(folder) for folder in folders if isinstance(folder, str)]
            names = {path: _FOLDER.fullmatch(path.name) for path in found if path.is_absolute()}
            return [path for path, name in names.items() if name and name[1] == arena.name.partition(".")[0]]
    return []


def erase_folder(path: Path) -> None:
    """Remove a folder, under another name: nobody finds half of it. Files that cannot be removed stay."""
    gone = path.with_name(f"{path.name.partition('.')[0]}.removed-{secrets.token_hex(4)}")
    try:
        path.rename(gone)
    except OSError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def sweep_folders(directory: Path) -> None:
    """Remove this user's folders in a directory that have no arena any more; no files of other names.

    One of another boot counts only if this host has made it: others may have the directory mounted, too.
    """
    for name in names_in(directory):
        match, path = _FOLDER.fullmatch(name), directory / name
        if match and int(match[2]) == os.getuid() and _is_private(path):
            with suppress(OSError):
                _sweep(path, is_removed=match[3] == "removed")


def _sweep(path: Path, *, is_removed: bool) -> None:
    try:
        lock = open_lock_of_others(path / OWNER)
    except FileNotFoundError:
        if is_removed or time.time() - path.stat().st_mtime > _GRACE:
            erase_folder(path)
        return
    try:
        if try_exclusive(lock) and (is_removed or _is_nobodys(path, parse_record(os.pread(lock, LARGEST, 0)))):
            logger.info("removed %s: the memory that its copies belong to is gone", path)
            erase_folder(path)
    finally:
        close_lock(lock)


def _is_nobodys(path: Path, record: dict[str, object]) -> bool:
    owner, arena = Process.from_record(record), record.get("arena")
    if owner is None or not isinstance(arena, str):
        return time.time() - path.stat().st_mtime > _GRACE
    if owner.boot != boot_id():
        return owner.host == socket.gethostname()
    return path not in folders_of(Path(arena))


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return is_private(status)
