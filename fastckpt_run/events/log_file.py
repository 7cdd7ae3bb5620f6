"""A file of events in a checkpoint directory, written by a thread of its own: storage may fail or hang."""

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.report.events import FOLDER, Name, in_folder

logger = logging.getLogger("fastckpt.launcher")

WAITING = 4 << 20
"""Bytes of lines that wait for storage, at most; beyond that the oldest are lost."""
BATCH = 1 << 16
"""Bytes that are written at once."""
KEPT = 50
"""Files of a host that are kept; older ones are removed."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before storage that failed is tried again: twice as long each time."""


class EventLog:
    """Appends lines to a new file below ``directory``; only `close` waits for it.

    Between writes the file is not open, so that it keeps no file system from being unmounted or made read-only.
    """

    def __init__(self, directory: Path, lines: Iterable[bytes]) -> None:
        self._files = DirectoryRoot(directory)
        self._folder = directory / FOLDER
        self._path: Path | None = None
        self._waiting = deque(lines)
        self._size = sum(map(len, self._waiting))
        self._unwritten = b""
        self._lost = 0
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fastckpt-events", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Have a line written, sooner or later."""
        with self._wake:
            self._waiting.append(line)
            self._size += len(line)
            # The oldest go first: the last events show more about its end.
            while self._size > WAITING:
                self._size -= len(self._waiting.popleft())
                self._lost += 1
                metrics.counts["events_lost"] += 1
            self._wake.notify()

    def close(self, seconds: float) -> bool:
        """Have the rest written, for at most so long; whether it was."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        # Bounded, and the thread is a daemon: storage that hangs does not keep the agent from ending.
        self._thread.join(seconds)
        return not (self._thread.is_alive() or self._waiting or self._unwritten)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while self._unwritten or self._take():
            try:
                self._unwritten = self._write(self._unwritten)
                pause = FIRST_PAUSE
            except OSError as error:
                # Once, and at debug: persists to the same directory report the trouble.
                if pause == FIRST_PAUSE:
                    logger.debug("events cannot be written to %s: %s", self._folder, error)
                if not self._pause(pause):
                    return
                pause = min(2 * pause, LONGEST_PAUSE)

    def _take(self) -> bytes:
        """Take the next lines, once there are some; none at the end."""
        with self._wake:
            while not self._waiting and not self._closed:
                self._wake.wait()
            lines = list[bytes]()
            if self._lost:
                lines.append(metrics.to_line(metrics.stamp("events_lost") | {"count": self._lost}))
                self._lost = 0
            full = self._size - BATCH
            while self._waiting and self._size > full:
                lines.append(self._waiting.popleft())
                self._size -= len(lines[-1])
            self._unwritten = b"".join(lines)
            return self._unwritten

    def _pause(self, seconds: float) -> bool:
        """Give storage time; False if there is none left."""
        with self._wake:
            return not self._closed and (self._wake.wait_for(lambda: self._closed, seconds) or True)

    def _write(self, data: bytes) -> bytes:
        """Write lines; return those that could not be written."""
        # O_APPEND and one write for whole lines: a kill leaves no line of two mixed events.
        self._path = self._path or self._new()
        file = self._files.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            # No fsync: after a power failure the last lines are lost, and nothing else.
            return data[os.write(file, data) :]
        finally:
            os.close(file)

    def _new(self) -> Path:
        """The path of a new file, after those of all launches before; this host's oldest make room."""
        self._files.make_directory(self._folder)  # in the saver's directory: one that was removed stays so
        logs = in_folder(self._folder)
        new = Name.new(logs[-1][0].number + 1 if logs else 1, socket.gethostname())
        ours = [path for name, path in logs if name.host == new.host]
        for path in ours[: max(0, len(ours) - KEPT + 1)]:
            self._files.unlink(path)
        return self._folder / new.to_text(os.getpid())
