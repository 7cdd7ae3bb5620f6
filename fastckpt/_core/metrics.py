"""Phases, counts, events, and values that scripts log: one mechanism for timing, logging and fault injection."""

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, SupportsIndex

from fastckpt._core.logged_values import LoggedValues, Value

logger = logging.getLogger("fastckpt")

counts: Counter[str] = Counter()
"""The number of times that each thing happened in this process."""

seconds: dict[str, float] = {}
"""Seconds that the last run of each phase took in this process."""

Observer = Callable[[str, dict[str, Any]], None]
_observers: list[Observer] = []
Listener = Callable[[dict[str, Any]], None]
_listeners: list[Listener] = []
LoggedReader = Callable[[int, Mapping[str, float]], None]
_readers: list[LoggedReader] = []
_events = -1
_logged = LoggedValues()


def log(step: SupportsIndex, values: Mapping[str, Value]) -> None:
    """Log values of this rank, such as ``log(step, {"loss": 0.1})``, to be watched (docs/reference/metrics.md).

    A thread sends the newest values to the agent, once a second at most. They wait for the first checkpointer. Forked
    processes log nothing.

    Args:
        step: Step of the values: a whole number, 0 or more.
        values: Numbers by name, also NaN and infinity: at most 100 names of 100 printable characters. Tensors of one
            element are copied to the host, after all queued work of a GPU.

    Raises:
        ConfigError: Invalid step, name or value; nothing is logged.
    """
    number, numbers = logged().put(step, values)
    for reader in _readers:
        reader(number, numbers)


def read_logged(reader: LoggedReader) -> None:
    """Call ``reader`` with all that this process logs from now on, in the thread that does."""
    _readers.append(reader)


def logged() -> LoggedValues:
    """The values that this process has logged."""
    global _logged
    if _logged.is_of_parent:
        _logged = LoggedValues()
    return _logged


def observe(observer: Observer) -> None:
    """Call ``observer(phase, fields)`` whenever a phase begins in this process, in the thread that begins it."""
    _observers.append(observer)


def unobserve(observer: Observer) -> None:
    """Stop calling an observer."""
    _observers.remove(observer)


@contextmanager
def phase(name: str, /, **fields: Any) -> Iterator[None]:
    """Time a phase, such as ``phase("snapshot.fill", step=7)``."""
    for observer in _observers:
        observer(name, fields)
    start = time.perf_counter()
    try:
        yield
    finally:
        took(name, time.perf_counter() - start, **fields)


def took(name: str, duration: float, /, **fields: Any) -> None:
    """Record the seconds of a phase that was timed otherwise, such as by a device."""
    seconds[name] = duration
    counts[name] += 1
    logger.debug("%s %.1f ms %s", name, 1e3 * duration, fields)


def write_events_to(path: str) -> None:
    """Append this process's events to the file at ``path``; an empty path stops that."""
    global _events
    if _events >= 0:
        os.close(_events)
    _events = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666) if path else -1


def listen(listener: Listener) -> None:
    """Call ``listener`` with each event of this process, in the thread in which it happens: it must not wait."""
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Stop calling a listener."""
    _listeners.remove(listener)


def stamp(name: str) -> dict[str, Any]:
    """The fields that every event has: its name, its time, and its process."""
    return {"event": name, "time": time.time(), "monotonic": time.monotonic(), "pid": os.getpid()}


def to_line(event: dict[str, Any]) -> bytes:
    """An event as a line of a log; values that JSON does not have become text."""
    return json.dumps(event, default=str).encode() + b"\n"


def finite(values: Mapping[str, float]) -> dict[str, float | str]:
    """Values for an event: JSON has no NaN and no infinity, which become the texts NaN, +Inf and -Inf."""
    return {name: value if math.isfinite(value) else _INFINITE.get(value, "NaN") for name, value in values.items()}


_INFINITE = {math.inf: "+Inf", -math.inf: "-Inf"}


def event(name: str, /, **fields: Any) -> None:
    """Record that something happened now: one line of JSON, complete even if this process dies next.

    One that cannot be written is lost, and counted: no reason to end training. All of them: docs/reference/events.md.
    """
    logger.debug("event %s %s", name, fields)
    happened = stamp(name) | fields
    for listener in _listeners:
        listener(happened)
    if _events >= 0:
        line = to_line(happened)
        try:
            lost = "" if os.write(_events, line) == len(line) else "the disk is full"
        except OSError as error:
            lost = str(error)
        if lost:
            if not counts["events_lost"]:
                logger.warning("an event could not be written, and is lost: %s", lost)
            counts["events_lost"] += 1
