"""One cache line of shared memory per local rank: how far each worker is, readable when it is dead."""

import hashlib
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from fastckpt.errors import FastckptError
from fastckpt.memory.locks import close_lock, lock_of

LINE = 64
"""Bytes of a rank's block: one cache line, so that ranks do not slow each other down."""
LONGEST_NAME = 200
BLOCKS = Path("/dev/shm")
"""Where the C library keeps these blocks."""
_LAYOUT = struct.Struct("<QqQ40s")


@dataclass(frozen=True)
class Telemetry:
    """What a worker said last.

    Attributes:
        generation: How often the workers had been restarted.
        step: The step it was at; -1 before the first.
        beat: When it said so, in nanoseconds of the monotonic clock; 0 for never.
        phase: The phase that it entered last, such as "snapshot.fill"; empty once a save is over.
    """

    generation: int
    step: int
    beat: int
    phase: str


class TelemetryBlock:
    """The blocks of all local ranks of a node, in a POSIX shared memory object."""

    def __init__(self, name: str, ranks: int = 0) -> None:
        """Open ``name``, or make it anew with room for ``ranks`` if that is given, and own it until `close`."""
        if ranks:
            unlink(name)
        self._lock = -1
        flags = posix_ipc.O_CREX if ranks else 0
        try:
            memory = posix_ipc.SharedMemory(name, flags, mode=0o600, size=ranks * LINE)
            if ranks:
                os.posix_fallocate(memory.fd, 0, ranks * LINE)  # else a full tmpfs would kill the first that beats
        except (posix_ipc.Error, OSError, ValueError) as error:
            raise FastckptError(f"no shared memory object {name} for {ranks} ranks: {error}") from error
        self.name = name
        try:
            self._map = mmap.mmap(memory.fd, memory.size)
            if ranks:
                self._lock = lock_of(memory.fd)
        except (OSError, ValueError) as error:
            raise FastckptError(f"shared memory object {name} cannot be used: {error}") from error
        finally:
            memory.close_fd()

    def beat(self, rank: int, generation: int, step: int, phase: str) -> None:
        """Say where this worker is; costs well under a microsecond."""
        now = time.monotonic_ns()
        _LAYOUT.pack_into(self._map, rank * LINE, generation, step, now, phase.encode()[:40])

    def read(self, rank: int) -> Telemetry:
        """What local rank ``rank`` said last."""
        generation, step, beat, phase = _LAYOUT.unpack_from(self._map, rank * LINE)
        return Telemetry(generation, step, beat, phase.rstrip(b"\0").decode(errors="replace"))

    def close(self) -> None:
        """Unmap."""
        self._map.close()
        if self._lock >= 0:
            close_lock(self._lock)


def telemetry_name(arena: Path) -> str:
    """The name of the block that belongs to an arena; POSIX names have no directories, and are short."""
    name = str(arena).strip("/").replace("/", ".")
    return f"/{name}" if len(name) < LONGEST_NAME else f"/fastckpt.{hashlib.sha256(name.encode()).hexdigest()}"


def unlink(name: str) -> None:
    """Remove the object if it is there; who has mapped it keeps it."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except (posix_ipc.Error, OSError):
        pass  # there is none, or it is another user's
