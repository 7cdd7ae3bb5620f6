"""Three cache lines of shared memory per local rank: how far each worker is, readable when it is dead."""

import contextlib
import hashlib
import mmap
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import posix_ipc

from fastckpt._core.memory.locks import close_lock, lock_of
from fastckpt.errors import FastckptError

LINE = 192
"""Bytes of a rank's block: whole cache lines, so that ranks do not slow each other down."""
LONGEST_NAME = 200
BLOCKS = Path("/dev/shm")
"""Where the C library keeps these blocks."""
_GENERATION, _STEP, _LOADED, _STEPS, _FIRST, _BEAT, _STALLED, _NAMED, _PID, _STACKS, _TURN = range(11)
"""Indices of eight-byte words, whose stores are never torn. The phase is written alternately in two places."""
_NUMBERS, _PHASE = 88, 52
"""Bytes of all words, and of a phase, which comes after them: the time it may take, and its name."""
_READS = 100
"""How often a phase is read again if it changed during the read."""


@dataclass(frozen=True)
class Telemetry:
    """The last report of a worker. Times are nanoseconds; instants are of the monotonic clock.

    Attributes:
        generation: How often the workers had been restarted.
        step: The newest step that a save or a load has named; -1 before that.
        loaded: The step that it resumed from in this generation; -1 if it began afresh, or has not loaded yet.
        steps: How many steps it has completed since it started: of its optimizers, or else saves.
        first: When the first of them was complete; 0 for not yet.
        beat: When it last reported; 0 for never.
        stalled: How long it has spent in saves and waiting for them, in total.
        named: How many steps it had completed when it named ``step``.
        pid: The process that reports; 0 once it has deregistered.
        stacks: How to ask for its Python stacks, as `memory.stacks` knows it; 0 if one cannot.
        allowed: How long its phase may last, by its own account; 0 if that is unknown.
        phase: What it is doing, such as "snapshot.fill"; empty for taking steps.
    """

    generation: int = 0
    step: int = 0
    loaded: int = 0
    steps: int = 0
    first: int = 0
    beat: int = 0
    stalled: int = 0
    named: int = 0
    pid: int = 0
    stacks: int = 0
    allowed: int = 0
    phase: str = ""


class TelemetryBlock:
    """The blocks of all local ranks of a node, in a POSIX shared memory object."""

    def __init__(self, name: str, ranks: int = 0) -> None:
        """Open ``name``, or make it again with room for ``ranks`` if that is given, and own it until `close`."""
        if ranks:
            unlink(name)
        self._lock = -1
        flags = posix_ipc.O_CREX if ranks else 0
        try:
            memory = posix_ipc.SharedMemory(name, flags, mode=0o600, size=ranks * LINE)
            if ranks:
                os.posix_fallocate(memory.fd, 0, ranks * LINE)  # else a full tmpfs kills the first to report
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
        self._bytes = memoryview(self._map)
        self._lines: list[Line] = []

    def line(self, rank: int) -> "Line":
        """Where local rank ``rank`` writes, until `close`; raises FastckptError if there is no such line."""
        if (rank + 1) * LINE > len(self._bytes):
            raise FastckptError(f"shared memory object {self.name} has no line {rank}")
        self._lines.append(Line(self._bytes[rank * LINE : (rank + 1) * LINE]))
        return self._lines[-1]

    def read(self, rank: int) -> Telemetry:
        """The last report of local rank ``rank``."""
        line = self._bytes[rank * LINE : (rank + 1) * LINE]
        words = line[:_NUMBERS].cast("q")
        for _ in range(_READS):
            turn = words[_TURN]
            phase = bytes(line[_NUMBERS + turn % 2 * _PHASE :][:_PHASE])
            if words[_TURN] == turn:
                break
        allowed = int.from_bytes(phase[:8], sys.byteorder, signed=True)
        found: list[Any] = [*words[:_TURN], allowed, phase[8:].rstrip(b"\0").decode(errors="replace")]
        return Telemetry(*found)

    def close(self) -> None:
        """Unmap; a read that a signal has ended keeps the mapping as long as its traceback is kept."""
        for line in self._lines:
            line.release()
        self._bytes.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        if self._lock >= 0:
            close_lock(self._lock)


class Line:
    """The reports of one worker; one thread writes at a time. Without shared memory nobody reads them."""

    def __init__(self, memory: memoryview | None = None) -> None:
        memory = memoryview(bytearray(LINE)) if memory is None else memory
        self._words = memory[:_NUMBERS].cast("q")
        self._phases = [memory[at:][:_PHASE] for at in (_NUMBERS, _NUMBERS + _PHASE)]

    def begin(self, generation: int, pid: int, stacks: int) -> None:
        """Report that a process has begun; clears what its predecessor reported."""
        self._words[_PID] = 0
        fresh = {_GENERATION: generation, _STEP: -1, _LOADED: -1}
        for word in range(_PID):
            self._words[word] = fresh.get(word, 0)
        self.enter("")
        self._words[_STACKS] = stacks
        self._words[_PID] = pid

    def step(self) -> None:
        """Report that a step is complete."""
        words = self._words
        now = time.monotonic_ns()
        words[_STEPS] += 1
        words[_BEAT] = now
        if not words[_FIRST]:
            words[_FIRST] = now

    def enter(self, phase: str, allowed: int = 0) -> None:
        """Report that a phase begins, which may last ``allowed`` nanoseconds; an empty one if steps follow."""
        words = self._words
        turn = words[_TURN] + 1
        record = allowed.to_bytes(8, sys.byteorder, signed=True) + phase.encode()[: _PHASE - 8]
        self._phases[turn % 2][:] = record.ljust(_PHASE, b"\0")
        words[_BEAT] = time.monotonic_ns()
        words[_TURN] = turn

    def at(self, step: int) -> None:
        """Report the step of a save."""
        # In this order: a reader never sees a new step with an old count.
        self._words[_NAMED], self._words[_STEP] = self._words[_STEPS], step

    def resume(self, step: int) -> None:
        """Report the step that was loaded."""
        self._words[_LOADED] = step
        self.at(step)

    def stall(self, nanoseconds: int) -> None:
        """Add to the time spent in saves."""
        self._words[_STALLED] += nanoseconds

    def leave(self) -> None:
        """Report that the process deregisters; ``beat`` stays as it was."""
        beat = self._words[_BEAT]
        self._words[_PID] = 0
        self.enter("")
        self._words[_BEAT] = beat

    def release(self) -> None:
        """Release the memory."""
        for part in (self._words, *self._phases):
            part.release()


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
