"""Reports of parts of a worker that need no checkpointer: they go to the agent over the connection of one, if any is.

Those from before the first connection are kept until then. Without a connection, such as after the last one, they are
events of this process alone.
"""

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Protocol

from fastckpt._core.config import RankInfo
from fastckpt._core.ipc.offload_messages import OffloadMessage, record_offload
from fastckpt.errors import ConfigError

MOST = 64
"""Reports that are kept for a first connection: the newest."""


class ReportConnection(Protocol):
    """A connection to the saver."""

    @property
    def is_read(self) -> bool:
        """True if the saver has read all that was sent."""

    def report_offload(self, message: OffloadMessage) -> None:
        """Send a report; it has no answer."""

    def report_logged(self, step: int, values: dict[str, float]) -> None:
        """Send values that the script has logged; there is no answer."""


class _Reports:
    """Reports of one process, and the connections that send them."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.connections: list[weakref.ref[ReportConnection]] = []
        self.kept: deque[OffloadMessage] | None = deque(maxlen=MOST)
        """None from the first connection on."""
        self.last: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.lock = threading.Lock()

    @property
    def open(self) -> list[ReportConnection]:
        """The connections that are open, oldest first."""
        return [found for each in self.connections if (found := each()) is not None]

    def conclude(self) -> None:
        """Have all send their last reports, if these reach the agent."""
        if self.open:
            # Not under the lock: they report.
            for each in [*self.last]:
                if (method := each()) is not None:
                    method()


_reports = _Reports()


def _of_this_process() -> _Reports:
    """Return the reports of this process.

    A forked process does not use those of its parent: both would write to the same sockets.
    """
    global _reports
    if _reports.pid != os.getpid():
        _reports = _Reports()
    return _reports


def report(message: OffloadMessage) -> None:
    """Report to the agent, or keep it for the first connection; in any thread."""
    reports = _of_this_process()
    with reports.lock:
        connection = next(iter(reports.open), None)
        if connection is None and reports.kept is not None:
            reports.kept.append(message)
    if connection is not None:
        connection.report_offload(message)
    else:
        record_offload(rank(), os.getpid(), message)


def connection() -> ReportConnection | None:
    """The oldest connection that is open."""
    return next(iter(_of_this_process().open), None)


def before_the_end(method: Callable[[], None]) -> None:
    """Call a bound method before the last connection is closed, and when the process ends with one open."""
    reports = _of_this_process()
    with reports.lock:
        reports.last = [*(each for each in reports.last if each() is not None), weakref.WeakMethod(method)]


def opened(connection: ReportConnection) -> None:
    """Use a connection from now on."""
    _conclude_at_exit()
    reports = _of_this_process()
    with reports.lock:
        reports.connections.append(weakref.ref(connection))
        kept, reports.kept = reports.kept, None
    for message in kept or ():
        connection.report_offload(message)


def closing(connection: ReportConnection) -> None:
    """Use a connection no more; with the last one, pending reports are sent first."""
    reports = _of_this_process()
    if reports.open == [connection]:
        reports.conclude()
    with reports.lock:
        reports.connections = [each for each in reports.connections if each() not in (None, connection)]


@cache
def _conclude_at_exit() -> None:
    atexit.register(lambda: _of_this_process().conclude())


def rank() -> int:
    """The rank of this process; 0 if its environment does not have it."""
    try:
        return RankInfo.from_environment().rank
    except ConfigError:
        return 0
