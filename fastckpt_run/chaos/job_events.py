"""Events of the launches with a checkpoint directory, read while these write them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fastckpt._core.report.events import FOLDER, Event, in_folder, text, whole
from fastckpt._core.storage.store import is_url
from fastckpt.errors import ConfigError
from fastckpt_run.watch.growing_logs import GrowingLog


class JobEvents:
    """The event logs of a directory; a store has none, nor a job with them turned off.

    Args:
        location: The checkpoint directory.
    """

    def __init__(self, location: str) -> None:
        self._folder = None if is_url(location) else Path(location) / FOLDER
        self._logs: dict[Path, GrowingLog] = {}

    def grow(self) -> None:
        """Read new events."""
        paths = list[Path]()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # nobody has written one yet
                paths = [path for _, path in in_folder(self._folder)]
        found = dict[Path, GrowingLog]()
        for path in paths:
            log = self._logs.get(path) or GrowingLog(path)
            with contextlib.suppress(OSError, ConfigError):  # an agent has made room for its own
                log.grow()
                found[path] = log
        self._logs = found

    def of_agent(self, pid: int) -> list[Event]:
        """The events of the newest launch of the agent with this number."""
        return next((list(_launch(log, pid)) for log in reversed(self._logs.values()) if _is_of(log, pid)), [])

    def launches(self) -> Iterator[list[Event]]:
        """The events of each launch, the newest first."""
        for path, log in reversed(self._logs.items()):
            pid = path.stem.rpartition("-")[2]
            if pid.isdecimal():
                yield list(_launch(log, int(pid)))

    def since(self, monotonic: float) -> list[Event]:
        """Events of all launches from an instant of the monotonic clock on, in order."""
        found = [event for log in self._logs.values() for event in log.events if event["monotonic"] >= monotonic]
        return sorted(found, key=lambda event: event["monotonic"])


def _is_of(log: GrowingLog, pid: int) -> bool:
    return log.path.name.endswith(f"-{pid}.jsonl")


def _launch(log: GrowingLog, pid: int) -> Iterator[Event]:
    return (event for event in log.events if event["pid"] == pid)


def last(events: list[Event], name: str) -> Event:
    """The last event of a name; an empty one if there is none."""
    return next((event for event in reversed(events) if event["event"] == name), {})


def restarts_left(events: list[Event]) -> int | None:
    """The restarts that a launch still has, by its newest event with them; None if that is not known."""
    named = (whole(event, "restarts_left", -1) for event in reversed(events) if "restarts_left" in event)
    left = next(named, -1)
    begun = whole(last(events, "job_started"), "max_restarts", -1)
    return left if left >= 0 else begun if begun >= 0 else None


def ending(events: list[Event]) -> str:
    """Describe the end of a launch by its events; empty if they do not have it."""
    outcome = text(last(events, "job_ended"), "outcome")
    why = text(last(events, "gave_up"), "text") if outcome == "failed" else ""
    return f"{outcome}{why and ': '}{why}"
