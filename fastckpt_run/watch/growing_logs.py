"""Event logs that grow while they are read: each read takes new events, in a thread that nobody waits for long."""

import os
import socket
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastckpt._core.report.events import FOLDER, Event, Log, Name, in_folder, objects, parsed, whole
from fastckpt.errors import ConfigError

MOST_LOGS = 200
"""Logs of a directory that are read, at most: the newest."""
BATCH = 1 << 20
"""Bytes that are read at once."""
LONGEST_LINE = 1 << 24


@dataclass
class GrowingLog:
    """A log file, as far as it was read; lines that other programs append are read by the next `grow`."""

    path: Path
    events: list[Event] = field(default_factory=list)
    unreadable: int = 0
    _offset: int = 0
    _file: int = 0
    _rest: bytes = b""

    def grow(self) -> None:
        """Read new events; the last line only when it is whole. Raises OSError, or ConfigError for no regular file."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{self.path} is no regular file")
            if found.st_ino != self._file or found.st_size < self._offset:
                self.events, self.unreadable, self._offset, self._rest = [], 0, 0, b""  # another file, or cut
                self._file = found.st_ino
            file.seek(self._offset)
            while data := file.read(BATCH):
                self._offset += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._take(lines)
                if len(self._rest) > LONGEST_LINE:
                    self._rest, self.unreadable = b"", self.unreadable + 1

    def _take(self, lines: Sequence[bytes]) -> None:
        log = parsed(self.path, lines)
        self.events += [thinned(event) for event in log.events]
        self.unreadable += log.unreadable


def thinned(event: Event) -> Event:
    """An event with only the fields for a report: of the ranks in a record of progress, one of each generation.

    A job of many ranks would fill the memory of the agent otherwise. The report takes from such a record the furthest
    rank, the newest heartbeat and the longest stall, of the workers of one generation.
    """
    if event["event"] != "progress":
        return event
    furthest = dict[int, dict[str, Any]]()
    for rank in objects(event, "ranks"):
        own, generation = dict(rank), whole(rank, "restart_count", 0)
        other = furthest.get(generation)
        if other is not None:
            one = max(own, other, key=lambda each: whole(each, "steps", 0))
            for name in ("beat", "stalled"):
                known = [each[name] for each in (own, other) if isinstance(each.get(name), int | float)]
                one[name] = max(known, default=None)
            own = one
        furthest[generation] = own
    return {**event, "ranks": list(furthest.values())}


class LogReader:
    """Reads all logs of a job: its checkpoint directory's, and the lines of this launch from memory.

    Args:
        lines: Events of this launch so far; only ever grows.
    """

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines
        self._folder: Path | None = None
        self._own = Log(Path("this launch"), [])
        self._taken = 0
        self._logs: dict[Path, GrowingLog] = {}
        self._ours: set[Path] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.trouble = ""
        """Reason why the logs of the directory are not read; empty if they are."""
        self.asked = 0.0
        """Time since when the directory does not answer, in seconds of the monotonic clock; 0 if it does."""

    def read(self, directory: str, wait: float) -> list[Log]:
        """All logs, those in a directory (empty: there is none) as far as they can be read within ``wait`` seconds."""
        with self._lock:
            self._own.events.extend(thinned(event) for event in self._new())
            if directory and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(
                    target=self._grow, args=(Path(directory) / FOLDER,), name="fastckpt-logs", daemon=True
                )
                self.asked = time.monotonic()
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(wait)
            # Storage that hangs keeps that thread, not this one: events that were read before are shown.
            if not thread.is_alive():
                self.asked = 0.0
        with self._lock:
            logs = [Log(log.path, [*log.events], log.unreadable) for log in self._logs.values()]
            return [*logs, Log(self._own.path, [*self._own.events])]

    def forget(self) -> None:
        """Give the memory back; the next `read` begins again."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._logs, self._own, self._taken, self._thread = {}, Log(self._own.path, []), 0, None

    def _new(self) -> list[Event]:
        lines = self._lines[self._taken :]
        self._taken += len(lines)
        return parsed(self._own.path, lines).events

    def _grow(self, folder: Path) -> None:
        try:
            found = [path for _, path in in_folder(folder)][-MOST_LOGS:]
        except FileNotFoundError:
            found = []  # no agent has written one yet
        except OSError as error:
            self.trouble = str(error)
            return
        logs, trouble = dict[Path, GrowingLog](), ""
        for path in found:
            log = self._logs.get(path) or GrowingLog(path)
            try:
                if path not in self._ours:
                    log.grow()
                    logs[path] = log
            except FileNotFoundError:
                pass  # an agent has made room for its own
            except (OSError, ConfigError) as error:
                trouble = str(error)
            if self._is_ours(log):
                self._ours.add(path)  # memory has it, too, and sooner
                logs.pop(path, None)
        self.trouble = trouble
        with self._lock:
            self._logs = logs

    def _is_ours(self, log: GrowingLog) -> bool:
        """Return whether this process writes it, and not one of the same number before."""
        own, ending = self._own.events, f"-{os.getpid()}.jsonl"
        if not own or not log.events or not log.path.name.endswith(ending):
            return False
        name, mine = Name.of(log.path.name), Name.new(1, socket.gethostname())
        return name is not None and name.host == mine.host and log.events[0]["monotonic"] >= own[0]["monotonic"]
