"""Sender of values that a script logs: a thread that gives the agent the newest, once a second at most."""

import os
import threading
import time

from fastckpt._core import metrics
from fastckpt._core.client import worker_reports

PAUSE = 1.0
"""Seconds from one message to the next."""


class _Sender:
    """Sends values that this process logs; nobody waits for it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._values = metrics.logged()
        self._sending = threading.Lock()
        self._values.follow(self._start)

    def _start(self) -> None:
        worker_reports.before_the_end(self.send)
        threading.Thread(target=self._run, name="fastckpt-logged", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._values.wait()
            self.send()
            time.sleep(PAUSE)

    def send(self) -> None:
        """Send new values, unless the saver has not read the last message: then newer ones may come."""
        with self._sending:  # the last one, before a connection is closed, waits for the one under way
            connection = worker_reports.connection()
            if connection is None or not connection.is_read:
                return
            step, values = self._values.take()
            if values:
                connection.report_logged(step, values)
                metrics.event("logged", step=step, rank=worker_reports.rank(), values=metrics.finite(values))


_sender: _Sender | None = None
_lock = threading.Lock()


def begin() -> None:
    """Send values that this process logs from now on, and has logged before; a connection is open."""
    global _sender
    with _lock:
        if _sender is None or _sender.pid != os.getpid():
            _sender = _Sender()
