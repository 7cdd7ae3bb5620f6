"""The agent's request for a forked worker, and the worker's report if its script fails."""

import ctypes
import json
import mmap
import os
import signal
from dataclasses import asdict, dataclass
from typing import Self

READY, GO = b"r", b"g"
DESCRIPTORS = 5
"""Descriptors with each order: the worker's stdin, stdout and stderr, the order itself, the pipe that lets it go."""
_REPORT = 1 << 16


@dataclass(frozen=True)
class ForkRequest:
    """One worker: its command line as under exec, all of its environment, its parent, the signals it ignores."""

    argv: list[str]
    environment: dict[str, str]
    parent: int
    ignored: list[int]

    def write(self) -> int:
        """A memory file with this order, and room for a report."""
        memory = os.memfd_create("fastckpt-order", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(memory), "wb") as file:
            # The report's room comes first, at a fixed offset that both sides can map before they know the length.
            file.write(bytes(_REPORT) + json.dumps(asdict(self)).encode())
        return memory

    @classmethod
    def read(cls, memory: int) -> Self:
        """The order in a memory file."""
        return cls(**json.loads(os.pread(memory, os.fstat(memory).st_size, _REPORT)))


class ForkReport:
    """The room for a report, shared by agent and worker: it outlives both descriptor and worker."""

    def __init__(self, memory: int) -> None:
        self._room = mmap.mmap(memory, _REPORT)

    def keep(self) -> None:
        """Never let go of the room, for a process that closes descriptors which others own.

        A mapping closes a descriptor of its own in the end, whose number may be another's by then.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._room))

    def write(self, text: str) -> None:
        """Leave the report of how a script ended, or the end of it."""
        content = text.encode(errors="replace")[1 - _REPORT :]
        self._room[: len(content)] = content

    def read(self) -> str:
        """The report; empty if there is none."""
        return bytes(self._room[:]).partition(b"\0")[0].decode(errors="replace")


def ignored_signals() -> list[int]:
    """The signals that a process executed by this one would ignore, but for those that Python restores for it."""
    restored = {signal.SIGPIPE, signal.SIGXFSZ}
    return [int(n) for n in signal.valid_signals() - restored if signal.getsignal(n) is signal.SIG_IGN]
