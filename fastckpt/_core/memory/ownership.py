"""The owner of an arena: one process at a time has the lock of its ``owner`` file, which names that process."""

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt._core.error_codes import coded
from fastckpt._core.io.regular_file import LARGEST
from fastckpt._core.memory.locks import close_lock, is_named, open_lock, try_exclusive
from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.records import naming, parse_record
from fastckpt.errors import ArenaInUse

FORKS_DEADLINE = 3.0
"""Seconds in which a child that a dead owner had just forked lets go of its locks."""
GLANCE = 0.1
"""Seconds for which a process that only looks at an arena may have its lock."""
OWNER = "owner"
_LAUNCHES = 50
"""Number of ended launches that an owner's file names."""


@dataclass(frozen=True)
class Owner:
    """Present or former owner of an arena, as its file names it.

    Attributes:
        process: None if it did not sign.
        directory: The checkpoint directory.
        launch: Id of the launch, unique; empty if an earlier version signed.
        since: Time at which it made or adopted the arena, to be read by people.
        ended: Launches that owned it until their end, one after the other, the last of many.
    """

    process: Process | None
    directory: str = ""
    launch: str = ""
    since: str = ""
    ended: tuple[str, ...] = ()

    @classmethod
    def current(cls, directory: str, launch: str, ended: Sequence[str] = ()) -> "Owner":
        """This process, from now on."""
        return cls(Process.current(), directory, launch, time.strftime("%Y-%m-%d %H:%M:%S"), tuple(ended))

    @classmethod
    def read(cls, lock: int) -> "Owner":
        """Read the owner from an open file."""
        record = parse_record(os.pread(lock, LARGEST, 0))
        directory, launch, since = (str(record.get(name) or "") for name in ("directory", "launch", "since"))
        ended = record.get("ended")
        launches = tuple(str(each) for each in ended[-_LAUNCHES:]) if isinstance(ended, list) else ()
        return cls(Process.from_record(record), directory, launch, since, launches)

    def and_its_predecessors(self) -> tuple[str, ...]:
        """The launches that have ended when nobody has its lock any more: it may have been killed before it saved."""
        return (*self.ended, *filter(None, [self.launch]))[-_LAUNCHES:]

    def sign(self, lock: int) -> None:
        """Sign a file that this process has locked."""
        record = self.process.to_record() if self.process else {}
        more = {"directory": self.directory, "launch": self.launch, "since": self.since, "ended": list(self.ended)}
        write_signed(lock, record | more)

    @property
    def is_alive(self) -> bool:
        """Return whether its process runs, as far as this process can see."""
        return self.process is not None and self.process.is_alive()

    @property
    def is_dead(self) -> bool:
        """Return whether its process has certainly ended; False for one in another container."""
        return self.process is None or self.process.is_dead()

    def __str__(self) -> str:
        process = self.process or "a process that did not sign"
        since = self.since or "some time ago"
        return f"{process} (launch {self.launch or 'unknown'}, checkpoint directory {self.directory}, since {since})"


def refuse(owner: Owner) -> None:
    """Wait for no other owner; raises ArenaInUse."""
    raise ArenaInUse(
        coded(
            f"checkpoint directory {owner.directory} is in use by another job on this host: {owner}. End that job, or "
            "give this one another.",
            "FC-002",
        )
    )


def own(path: Path, wait: Callable[[Owner], None]) -> int:
    """The lock of an arena that nobody else owns, which is made if need be.

    While another process owns it, ``wait`` is called again and again: it takes a moment, or raises.
    """
    start = time.monotonic()
    while True:
        try:
            make_private(path)
            lock = open_lock(path / OWNER)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            continue  # the former owner removed it
        try:
            with naming(path / OWNER):
                owner, owned = Owner.read(lock), not try_exclusive(lock)
        except OSError:
            close_lock(lock)
            raise
        named = is_named(lock, path / OWNER)
        if named and not owned:
            return lock
        close_lock(lock)
        if named and time.monotonic() > start + (GLANCE if owner.is_alive else FORKS_DEADLINE):
            wait(owner)
        else:
            time.sleep(0.01)


def write_signed(lock: int, record: Mapping[str, Any]) -> None:
    """Write a record into a file that the caller has locked; raises OSError."""
    data = json.dumps(record).encode()
    os.pwrite(lock, data.ljust(os.fstat(lock).st_size), 0)  # in one go: whenever we die, it can be read
    os.truncate(lock, len(data))


def is_private(status: os.stat_result) -> bool:
    """Return whether a status is that of a directory that only this user can access."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def make_private(path: Path) -> None:
    """Make a directory of this user alone, unless it is there; raises ArenaInUse if it is something else."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not is_private(status):
        raise ArenaInUse(
            coded(
                f"{path} is not a private directory of this user (mode {status.st_mode:o}, owner {status.st_uid}); "
                f"remove it, or choose another tmpfs with --fast-shm-dir",
                "FC-003",
            )
        )
