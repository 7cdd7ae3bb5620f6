"""The event logs of a checkpoint directory: their files, and their events as far as they can be read."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from fastckpt._core.io.regular_file import IrregularFile, open_regular
from fastckpt._core.storage.local.layout import PRIVATE
from fastckpt._core.storage.store import as_path
from fastckpt.errors import ConfigError

FOLDER = f"{PRIVATE}/events"
"""The folder of logs in a checkpoint directory: one file for each launch on each node, in order of launch."""
LONGEST = 1 << 24
"""Bytes of a line that is no event."""
_NAME = re.compile(r"(\d{6,12})-([^/]{1,200})-\d+\.jsonl")
_LONGEST = 1e12
"""Seconds that no clock shows."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Log:
    """A log file that was read: its events in order, and how many lines are none."""

    path: Path
    events: list[Event]
    unreadable: int = 0


class Name(NamedTuple):
    """The parts of a log's file name: its number in the order of launches, and its host."""

    number: int
    host: str

    @classmethod
    def of(cls, text: str) -> "Name | None":
        """Read a file's name; None if it is not that of a log."""
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None

    @classmethod
    def new(cls, number: int, host: str) -> "Name":
        """One for a new log."""
        return cls(number, re.sub("[^A-Za-z0-9._-]", "_", host)[:100])

    def to_text(self, pid: int) -> str:
        """Return the name of a file that the process ``pid`` writes."""
        return f"{self.number:06d}-{self.host}-{pid}.jsonl"


def find(location: str | os.PathLike[str]) -> list[Path]:
    """The logs of a checkpoint directory, oldest first; or the one that ``location`` is. Raises ConfigError."""
    location = as_path(location)
    path = Path(location)
    if location and path.is_file():
        return [path]
    if not location or not path.is_dir():
        hint = "; of one that is a URL, give the file of --fast-events" if "://" in location else ""
        raise ConfigError(
            f"{location or 'nothing'} is no directory; give a checkpoint directory, or an event log{hint}"
        )
    folder = path / FOLDER
    found = in_folder(folder) if folder.is_dir() else []
    if not found:
        raise ConfigError(
            f"{path} has no event log: agents of fastckpt-run write it unless there is --fast-no-event-log; for a "
            "checkpoint directory that is a URL, give the file of --fast-events"
        )
    return [path for _, path in found]


def in_folder(folder: Path) -> list[tuple[Name, Path]]:
    """The logs in a folder, oldest first; raises OSError."""
    return sorted((name, path) for path in folder.iterdir() if (name := Name.of(path.name)) is not None)


def read(path: Path) -> Log:
    """Read a log, and count lines that are torn or no event. Raises OSError, or ConfigError for no regular file."""
    try:
        descriptor = open_regular(path, follow=True)
    except IrregularFile as error:
        raise ConfigError(f"{path} is no regular file") from error
    with os.fdopen(descriptor, "rb") as file:
        return parsed(path, iter(partial(file.readline, LONGEST), b""))


def parsed(path: Path, lines: Iterable[bytes]) -> Log:
    """A log of these lines, without the events of single saves: there may be millions, and agents count them."""
    events, unreadable = list[Event](), 0
    for line in lines:
        if line.startswith(_SAVED) and line.endswith((b"}", b"}\n")):
            continue
        event = _event(line)
        if event is not None:
            events.append(event)
        elif line.strip():
            unreadable += 1
    return Log(path, events, unreadable)


_SAVED = b'{"event": "saved"'


def launches(log: Log) -> list[list[Event]]:
    """The events of each agent that wrote to a log, by its clock, without those that workers wrote themselves.

    Agents are in the order in which they began to write: clocks of several boots of hosts cannot be compared.
    """
    found, last = list[list[Event]](), dict[int, list[Event]]()
    for event in log.events:
        if event["pid"] not in last or event["event"] == "job_started":
            found.append([])
            last[event["pid"]] = found[-1]
        last[event["pid"]].append(event)
    agents = (launch for launch in found if any(event["event"] in _AGENTS for event in launch))
    return [sorted(launch, key=lambda event: event["monotonic"]) for launch in agents]


_AGENTS = {"job_started", "rendezvous", "workers_started", "progress", "job_ended"}


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if "monotonic" not in event:
        event["monotonic"] = event.get("time")
    sound = all(is_time(event.get(name)) for name in ("time", "monotonic"))
    return event if sound and type(event.get("pid")) is int else None


# --- fields, which may be anything: a file is no promise


def is_time(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of seconds that a clock may show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LONGEST < value < _LONGEST


def whole(event: Event, name: str, default: int) -> int:
    """A field that should be a whole number of reasonable size."""
    value = event.get(name)
    return value if type(value) is int and abs(value) < 1 << 63 else default


def text(event: Event, name: str) -> str:
    """A field that should be a text; else empty."""
    value = event.get(name)
    return value if isinstance(value, str) else ""


def nanoseconds(event: Event, name: str) -> int | None:
    """A field that should be a number of seconds, in nanoseconds."""
    value = event.get(name)
    return round(value * 1e9) if is_time(value) else None


def objects(event: Event, name: str) -> Iterator[Event]:
    """The objects in a field that should be a list of them."""
    value = event.get(name)
    yield from (part for part in value if isinstance(part, dict)) if isinstance(value, list) else ()
