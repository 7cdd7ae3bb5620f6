"""The process that watches other agents for its agent, which itself may be kept from running for seconds.

An agent copies, hashes and compiles; a thread of it would answer late, and be taken for lost. This process does nothing
else, is small, and imports no torch. It follows its agent: it ends with it, and is silent while that is stopped.
"""

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastckpt_run.detection.neighbor_watch import NeighborWatch
from fastckpt_run.parent_death import die_with

logger = logging.getLogger("fastckpt.launcher")


class AgentChannel(logging.Handler):
    """The connection to the agent: objects of JSON, one a line. As a handler, it has the agent log each record."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._file = connection.makefile("rwb")
        self._turn = threading.Lock()

    def send(self, **fields: Any) -> None:
        """Send an object; an agent that is gone needs none."""
        with self._turn:
            try:
                self._file.write(json.dumps(fields).encode() + b"\n")
                self._file.flush()
            except OSError:
                os._exit(0)

    def receive(self) -> dict[str, Any]:
        """The next object; ends the process with the agent."""
        try:
            line = self._file.readline()
        except ConnectionResetError:  # the agent was killed, and had not read all
            line = b""
        if not line:
            os._exit(0)
        found: dict[str, Any] = json.loads(line)
        return found

    def emit(self, record: logging.LogRecord) -> None:
        """Send a message of the log."""
        self.send(level=record.levelno, text=record.getMessage())


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def main(agent: int, channel: int, listener: int) -> None:
    """Serve the agent with this pid, which has left two descriptors: a socket to it, and one that listens."""
    die_with(agent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it to all processes; the agent ends this one
    own = AgentChannel(socket.socket(fileno=channel))
    first = own.receive()
    logger.addHandler(own)
    logger.setLevel(first["level"])
    logger.propagate = False

    def lost(members: Sequence[str], reason: str) -> None:
        own.send(lost=[*members], reason=reason)

    watch = NeighborWatch(
        bytes.fromhex(first["secret"]), first["id"], lost, first["timeout"],
        socket.socket(fileno=listener), partial(is_stopped, agent),
    )  # fmt: skip

    def probe(member: str) -> None:
        with suppress(CancelledError, RuntimeError):  # the watch ends meanwhile, and its loop: nobody waits for this
            own.send(probed=member, answers=watch.answers(member))

    while True:
        match own.receive():
            case {"watch": list(members)}:
                watch.watch([(id, address) for id, address in members])
            case {"probe": str(member)}:
                threading.Thread(target=probe, args=(member,), daemon=True).start()
            case {"count": True}:
                own.send(sent=watch.sent)
            case _:
                watch.stop()
                own.send(sent=watch.sent)
                return
