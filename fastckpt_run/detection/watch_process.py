"""The watch over other agents, as their agent has it: a process of its own, which is started again if it ends."""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.ipc.listener import listen
from fastckpt_run.detection.neighbor_watch import APART, TOGETHER, OnLost
from fastckpt_run.detection.reception import address_of

logger = logging.getLogger("fastckpt.launcher")

SENT = "detection.messages"
"""The count of messages that the watch has sent to other agents."""
_START = """import sys
sys.path.insert(0, sys.argv.pop(1))
from fastckpt_run.detection.watch_service import main
main(*map(int, sys.argv[1:]))
"""
_AGAIN = 1.0
"""Seconds from one start of the process to the next, at least."""
_FAREWELL = 5.0


class WatchProcess:
    """Has a process watch the other agents of a job; see `NeighborWatch` for its work and for the arguments.

    The agent holds the socket at which the process listens: while that starts again, the kernel accepts connections.

    Attributes:
        address: Address at which this agent is watched, as ``host:port``.
        pid: Of the process.
    """

    def __init__(self, secret: bytes, own_id: str, on_lost: OnLost, timeout: float = 2.0, host: str = "") -> None:
        self._first = {"secret": secret.hex(), "id": own_id, "timeout": timeout, "level": logger.getEffectiveLevel()}
        self._on_lost = on_lost
        self._listener = listen(host)
        self.address = address_of(self._listener)
        self._lock = threading.Lock()
        self._answered = threading.Condition()
        self._answers: dict[str, bool] = {}
        self._members: list[tuple[str, str]] = []
        self._apart: set[str] = set()
        self._sent = 0
        self._is_over = False
        self._begin()
        self._thread = threading.Thread(target=self._serve, name="fastckpt-neighbors", daemon=True)
        self._thread.start()

    def watch(self, members: Sequence[tuple[str, str]]) -> None:
        """Watch these members from now on, each an id and ``host:port``; all are given the same, in the same order."""
        with self._lock:
            self._members = [*members]
            self._send(watch=self._members)

    def answering(self, ids: Collection[str], seconds: float = 2.0) -> frozenset[str]:
        """Return the members that are not found to be silent: they answer a probe, or the process was too slow."""
        known = {id for id, _ in self._members} & {*ids}
        with self._answered:
            for id in known:
                self._answers.pop(id, None)
                self._send(probe=id)
            self._answered.wait_for(lambda: known <= self._answers.keys(), seconds)
            return frozenset(id for id in known if self._answers.get(id, True))

    def stop(self) -> None:
        """Leave, so that nobody suspects this member, and end the process."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._send(stop=True)
        self._thread.join(_FAREWELL)
        self._process.kill()
        self._process.wait()
        self._listener.close()

    def _begin(self) -> None:
        """Start the process, with its arguments."""
        self._socket, theirs = socket.socketpair()
        ours = str(Path(__file__).parents[2])
        with theirs:
            descriptors = (theirs.fileno(), self._listener.fileno())
            arguments = [ours, str(os.getpid()), *map(str, descriptors)]
            self._process = Popen(
                [sys.executable, "-I", "-S", "-c", _START, *arguments],
                stdin=DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C must reach the agent alone, which ends it
            )
        self.pid = self._process.pid
        self._send(**self._first)
        if self._members:
            self._send(watch=self._members)

    def _send(self, **fields: Any) -> None:
        with suppress(OSError):  # it has ended, which the thread finds
            self._socket.sendall(json.dumps(fields).encode() + b"\n")

    def _serve(self) -> None:
        """Handle the messages of the process, and start it again when it ends."""
        while True:
            began = time.monotonic()
            with self._socket, self._socket.makefile("rb") as lines, suppress(ConnectionResetError):
                for line in lines:
                    self._take(json.loads(line))
            with self._lock:
                if self._is_over:
                    return
            logger.warning("the process that watches other nodes ended (%d); another one is started", self._reap())
            time.sleep(max(0.0, began + _AGAIN - time.monotonic()))
            with self._lock:
                if self._is_over:
                    return
                self._sent = 0
                apart, self._apart = sorted(self._apart), set()
                self._begin()
            if apart:  # the next process finds out whether they still are
                self._on_lost(apart, TOGETHER)

    def _reap(self) -> int:
        return self._process.wait()

    def _take(self, said: dict[str, Any]) -> None:
        match said:
            case {"lost": list(members), "reason": str(reason)}:
                self._apart = self._apart | {*members} if reason == APART else self._apart - {*members}
                self._on_lost(members, reason)
            case {"probed": str(member), "answers": bool(answers)}:
                with self._answered:
                    self._answers[member] = answers
                    self._answered.notify_all()
            case {"sent": int(count)}:
                metrics.counts[SENT] += count - self._sent
                self._sent = count
            case {"level": int(level), "text": str(text)}:
                logger.log(level, "%s", text)
