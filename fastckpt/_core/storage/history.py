"""The records of histories in a durable place: the launch that has opened each, decided by exclusive creation.

A launch opens a history when it creates its record, ``.fastckpt/history-N``. Only its holder writes to it again: it
counts up, so that others see that it lives, and is marked as closed at an orderly end.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from fastckpt._core.format.ids import LARGEST, SaveId
from fastckpt._core.io.directory_root import WITHOUT_LINKS
from fastckpt._core.io.durable import explained
from fastckpt._core.io.regular_file import IrregularFile, read_small
from fastckpt._core.storage.local.layout import Layout
from fastckpt.errors import ProtocolError

_NAME = re.compile("history-(0|[1-9][0-9]{0,18})")
_PAGE = 1024
"""Records have whole ones, so that a new text takes the place of the old one in a single write."""
LARGEST_TEXT = 1 << 20
NEWEST = 16
"""Number of newest records that are never removed: jobs and memory that were idle for some launches need theirs."""
AT_ONCE = 64
"""Number of records that one sweep removes at most."""


@dataclass(frozen=True)
class Record:
    """Record of the launch that has opened a history.

    Attributes:
        history: Its number.
        token: Of the workers' round that saves in it.
        launch: Of the launch that holds it; empty if the record cannot be read.
        location: The checkpoint directory of that job.
        holder: The process that holds it, as it signs.
        members: Launches of the agents of all nodes, which belong to the same job.
        parent: The checkpoint that was resumed; None at the start of a job.
        since: Time at which it was opened, to be read by people.
        count: Number of renewals; of one that cannot be read, a number that differs with its text.
        closed: True if its holder has come to an orderly end.
        finished: True if that was the good end of the job: the script is done, and its saves are durable.
    """

    history: int
    token: str = ""
    launch: str = ""
    location: str = ""
    holder: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    parent: SaveId | None = None
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    count: int = 0
    closed: bool = False
    finished: bool = False

    def renewed(self) -> "Record":
        """The same, counted up."""
        return replace(self, count=self.count + 1)

    def to_bytes(self) -> bytes:
        """JSON in whole pages: of a size that renewals do not change."""
        body = vars(self) | {"parent": self.parent.to_json() if self.parent else None, "count": f"{self.count:020}"}
        text = json.dumps(body | {"closed": int(self.closed), "finished": int(self.finished)}).encode()
        return text.ljust(-(-len(text) // _PAGE) * _PAGE - 1) + b"\n"

    @classmethod
    def from_bytes(cls, history: int, text: bytes) -> "Record":
        """Read the text of `to_bytes`; any other text is a record without a holder, alive as long as it changes."""
        try:
            body = json.loads(text)
            parent = SaveId.from_json(body["parent"]) if body["parent"] else None
            names = {name: str(body[name]) for name in ("token", "launch", "location", "since")}
            members, holder = tuple(map(str, body["members"])), dict(body["holder"])
            count, closed, finished = int(body["count"]), bool(body["closed"]), bool(body.get("finished"))
        except (ValueError, KeyError, TypeError, RecursionError, ProtocolError):
            return cls(history, since="some time ago", count=int(hashlib.sha256(text).hexdigest()[:12], 16))
        return cls(
            history,
            **names,
            holder=holder,
            members=members,
            parent=parent,
            count=count,
            closed=closed,
            finished=finished,
        )


class Histories(Protocol):
    """The records of one place. Methods raise PersistError if it does not answer."""

    @property
    def excludes(self) -> bool:
        """True if there is an operation there in which exactly one of several callers succeeds."""

    def newest(self, *, fresh: bool = True) -> int:
        """The number of the newest history that has a record; 0 for none.

        If ``fresh``, no listing that a network file system has kept will do; readers of the place may notice that look.
        """

    def read(self, history: int) -> Record | None:
        """The record of a history; None if it has none."""

    def create(self, record: Record) -> bool:
        """Make a record, durably, unless its history has one; whether it is there by this call.

        Raises ConfigError if the place let it be made twice.
        """

    def write(self, record: Record) -> None:
        """Write a record that one has made again; raises PersistError if it is gone."""

    def forget(self, needed: Collection[int]) -> list[str]:
        """Remove records of which nothing is there; their names.

        ``needed`` are the histories of all checkpoints there, and of parts of such.
        """


def outdated(histories: Iterable[int], needed: Collection[int]) -> list[int]:
    """Return the records that decide nothing any more, oldest first, as many as are to be removed at once.

    A record newer than all checkpoints distinguishes memory from that of another line. The newest of all names the job
    that may write. An older one names the job that wrote its checkpoints.
    """
    newest = max(needed, default=0)
    older = sorted(set(histories) - {0})[:-NEWEST]
    return [history for history in older if history < newest and history not in needed][:AT_ONCE]


class DirectoryHistories:
    """Histories of a directory."""

    excludes = True

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def newest(self, *, fresh: bool = True) -> int:
        """See `Histories`."""
        with explained("look for histories", self._layout.root):
            if fresh:
                self._refresh()
            return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        return [number_of(name) for name in self._layout.names()]

    def _refresh(self) -> None:
        """Change the directory, so that no network file system answers from a listing that it has kept."""
        with contextlib.suppress(OSError):  # it is read-only, full or gone
            draft = self._layout.draft("tmp")
            self._layout.files.write_text(draft, "")
            self._layout.files.unlink(draft)

    def read(self, history: int) -> Record | None:
        """See `Histories`."""
        with explained("read a history's record", self._layout.root):
            try:
                return Record.from_bytes(history, read_small(self._path(history), LARGEST_TEXT))
            except (FileNotFoundError, NotADirectoryError):
                return None
            except IrregularFile:
                return Record.from_bytes(history, b"")

    def create(self, record: Record) -> bool:
        """See `Histories`."""
        with explained("open a history", self._layout.root), self._layout.writing():
            path = self._path(record.history)
            if made := self._put(path, record.to_bytes().decode()):
                self._layout.files.sync(path.parent)
            return made

    def _put(self, path: Path, text: str) -> bool:
        """Make a record that is there whole or not at all, where there are hard links."""
        files, draft = self._layout.files, self._layout.draft("tmp")
        files.write_text(draft, text)
        try:
            files.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in WITHOUT_LINKS:
                raise
            try:
                files.write_text(path, text)
            except FileExistsError:
                return False
        finally:
            files.unlink(draft)
        return True

    def write(self, record: Record) -> None:
        """See `Histories`. In place: a rename would look to readers as if checkpoints came and went."""
        with explained("renew a history", self._layout.root):
            path = self._path(record.history)
            descriptor = self._layout.files.open(path, os.O_RDWR)
            try:
                # Others may have given its name to a file of the user (a hard link), of which nothing may be lost.
                if Record.from_bytes(record.history, os.pread(descriptor, LARGEST_TEXT, 0)).token != record.token:
                    raise OSError(errno.ESTALE, "it is not the record that this launch made", str(path))
                os.pwrite(descriptor, record.to_bytes(), 0)
            finally:
                os.close(descriptor)

    def forget(self, needed: Collection[int]) -> list[str]:
        """See `Histories`."""
        with explained("remove old records of histories", self._layout.root):
            paths = [self._path(history) for history in outdated(self._numbers(), needed)]
            for path in paths:
                self._layout.files.unlink(path)
            return [path.name for path in paths]

    def _path(self, history: int) -> Path:
        return self._layout.private / f"history-{history}"


def number_of(name: str) -> int:
    """The history of the record of this name; 0 if it is no record's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and int(match[1]) <= LARGEST else 0
