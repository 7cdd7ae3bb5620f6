"""Shared memory per local rank: how far each worker is, and where its time goes, readable when it is dead."""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import posix_ipc

from fastckpt._core.huge_pages import map_without_descriptor
from fastckpt._core.memory.locks import close_lock, is_named, lock_of, open_lock_of_others, try_exclusive
from fastckpt.errors import FastckptError

LONGEST_NAME = 200
BLOCKS = Path("/dev/shm")
"""Directory in which the C library keeps these blocks."""
STEP_BOUNDS = tuple(2**power / 1000 for power in range(21))
"""Seconds up to which a step is in one of the first buckets; longer ones are in one more."""
PARTS = ("data", "forward", "backward", "rest", "wait")
"""Parts of a step; all but the last are the rank's own time, that is the wait in collectives."""
_GENERATION, _STEP, _LOADED, _STEPS, _FIRST, _BEAT, _STALLED, _NAMED, _PID, _STACKS, _PATIENCE = range(11)
_TURN, _STEPPING = 11, 12
"""Indices of eight-byte words: their stores are never torn. The phase is written alternately in two places."""
_DURATIONS = range(13, 14 + len(STEP_BOUNDS))
_SHORTEST, _LONGEST = _DURATIONS[0], _DURATIONS[-1]
_PARTS = range(_DURATIONS.stop, _DURATIONS.stop + len(PARTS))
_NUMBERS, _PHASE = 8 * _PARTS.stop, 52
"""Bytes of all words, and of a phase, which comes after them: the time it may take, and its name."""
_CACHE_LINE = 64
_HEAD = -(-(_NUMBERS + 2 * _PHASE) // _CACHE_LINE) * _CACHE_LINE
PLACES = 32
"""Windows that a reader finds: the newest, so that one that looks each second misses none of steps of 2 ms."""
_WINDOW = _CACHE_LINE
LINE = _HEAD + PLACES * _WINDOW
"""Bytes of a rank's block: whole cache lines, so that ranks do not slow each other down."""
_TRIES = 20
_SWEEP = 1.0
"""Seconds for which a sweep holds the lock of an object, at most."""
_READS = 100
"""Attempts to read a phase that changes during the read."""


@dataclass(frozen=True)
class Telemetry:
    """The last report of a worker. Times are nanoseconds; instants are of the monotonic clock.

    Attributes:
        generation: Number of restarts of the workers.
        step: The newest step that a save, a load or the script has named; -1 before that.
        loaded: The step that it resumed from in this generation; -1 if it began afresh, or has not loaded yet.
        steps: Number of steps completed since it started: those that the script names, else those of its optimizers,
            else saves.
        first: Time at which the first of them was complete; 0 for not yet.
        beat: Time of its last report; 0 for never.
        stalled: Time spent in saves and waiting for them, in total.
        named: Number of completed steps when it named ``step``.
        pid: The process that reports; 0 once it has deregistered.
        stacks: Number by which `memory.stacks` asks for its Python stacks; 0 for none.
        patience: Longest wait in a collective that its process groups allow; 0 if that is unknown.
        allowed: Longest duration of its phase, by its own account; 0 if that is unknown.
        phase: Name of its phase, such as "snapshot.fill"; empty for taking steps.
        durations: Number of steps that took at most each of `STEP_BOUNDS` (and more than the one before), and longer
            ones. The time is from the step before, without saves, loads and marked phases: the first step is not
            counted.
        stepping: Time of all these steps.
        parts: Time spent in each of `PARTS`, in total; all 0 if that is not measured.
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
    patience: int = 0
    allowed: int = 0
    phase: str = ""
    durations: tuple[int, ...] = (0,) * len(_DURATIONS)
    stepping: int = 0
    parts: tuple[int, ...] = (0,) * len(PARTS)


@dataclass(frozen=True)
class StepWindow:
    """Means over the steps of one window of a worker.

    Attributes:
        number: Its number, from 1; windows of all ranks with one number are of the same steps.
        parts: Nanoseconds per step of each of `PARTS`; without the slowest steps of the window.
        own: Nanoseconds per step outside of collectives, of all steps.
    """

    number: int
    parts: tuple[int, ...]
    own: int


class TelemetryBlock:
    """The blocks of all local ranks of a node, in a POSIX shared memory object."""

    def __init__(self, name: str, ranks: int = 0) -> None:
        """Open ``name``, or make it again with room for ``ranks`` if that is given, and own it until `close`."""
        self._lock = -1
        try:
            if ranks:
                memory, self._lock = _made(name, ranks * LINE)
                os.posix_fallocate(memory.fd, 0, ranks * LINE)  # else a full tmpfs kills the first to report
            else:
                memory = posix_ipc.SharedMemory(name)
        except (posix_ipc.Error, OSError, ValueError) as error:
            self._give_up_lock()
            raise FastckptError(f"no shared memory object {name} for {ranks} ranks: {error}") from error
        self.name = name
        try:
            self._map = map_without_descriptor(memory.fd, memory.size)
        except (OSError, ValueError) as error:
            self._give_up_lock()
            raise FastckptError(f"shared memory object {name} cannot be used: {error}") from error
        finally:
            memory.close_fd()
        self._bytes = memoryview(self._map)
        self._lines: list[Line] = []

    @property
    def ranks(self) -> int:
        """Number of local ranks that there is room for."""
        return len(self._bytes) // LINE

    def line(self, rank: int) -> "Line":
        """Return the line that local rank ``rank`` writes, until `close`; raises FastckptError if there is none."""
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
        durations, parts = (tuple(words[each.start : each.stop]) for each in (_DURATIONS, _PARTS))
        name = phase[8:].rstrip(b"\0").decode(errors="replace")
        found: list[Any] = [*words[:_TURN], allowed, name, durations, words[_STEPPING], parts]
        return Telemetry(*found)

    def windows(self, rank: int) -> list[StepWindow]:
        """The newest windows of local rank ``rank``, in order; one that is being written is left out."""
        line = self._bytes[rank * LINE + _HEAD : (rank + 1) * LINE].cast("q")
        words, found = _WINDOW // 8, list[StepWindow]()
        for at in range(0, len(line), words):
            number, *values = line[at : at + words].tolist()
            if number and line[at] == number:
                found.append(StepWindow(number, tuple(values[: len(PARTS)]), values[len(PARTS)]))
        return sorted(found, key=lambda window: window.number)

    def close(self) -> None:
        """Unmap; a read that a signal has ended keeps the mapping as long as its traceback is kept."""
        for line in self._lines:
            line.release()
        self._bytes.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        self._give_up_lock()

    def _give_up_lock(self) -> None:
        if self._lock >= 0:
            close_lock(self._lock)


class Line:
    """The reports of one worker; one thread writes at a time. Without shared memory nobody reads them."""

    def __init__(self, memory: memoryview | None = None) -> None:
        memory = memoryview(bytearray(LINE)) if memory is None else memory
        self._words = memory[:_NUMBERS].cast("q")
        self._phases = [memory[at:][:_PHASE] for at in (_NUMBERS, _NUMBERS + _PHASE)]
        self._windows = memory[_HEAD:].cast("q")
        self._last = self._left = self._away = self._stepping = 0

    def begin(self, generation: int, pid: int, stacks: int) -> None:
        """Report that a process has begun; clears its predecessor's report."""
        self._words[_PID] = 0
        fresh = {_GENERATION: generation, _STEP: -1, _LOADED: -1}
        for word in (*range(_PID), _PATIENCE, _STEPPING, *_DURATIONS, *_PARTS):
            self._words[word] = fresh.get(word, 0)
        for place in range(0, len(self._windows), _WINDOW // 8):
            self._windows[place] = 0
        self._last = self._left = self._away = self._stepping = 0
        self.enter("")
        self._words[_STACKS] = stacks
        self._words[_PID] = pid

    def step(self) -> None:
        """Report that a step is complete."""
        words, last = self._words, self._last
        self._last = words[_BEAT] = now = time.monotonic_ns()
        words[_STEPS] += 1
        if last:
            took = now - last - self._away
            # The number of whole milliseconds has as many binary digits as its bucket is high.
            bucket = _SHORTEST + ((took - 1) // 1_000_000).bit_length()
            words[bucket if bucket < _LONGEST else _LONGEST] += 1
            self._stepping += took
            words[_STEPPING] = self._stepping
        else:
            words[_FIRST] = now
        self._left = self._away = 0

    def beat(self) -> None:
        """Report that a step goes on."""
        self._words[_BEAT] = time.monotonic_ns()

    def enter(self, phase: str, allowed: int = 0) -> None:
        """Report that a phase begins, which may last ``allowed`` nanoseconds; an empty one if steps follow."""
        words = self._words
        turn = words[_TURN] + 1
        record = allowed.to_bytes(8, sys.byteorder, signed=True) + phase.encode()[: _PHASE - 8]
        self._phases[turn % 2][:] = record.ljust(_PHASE, b"\0")
        words[_BEAT] = now = time.monotonic_ns()
        words[_TURN] = turn
        if not phase and self._left:
            self._away += now - self._left
            self._left = 0
        elif phase and not self._left:
            self._left = now

    def wait_at_most(self, nanoseconds: int) -> None:
        """Report how long process groups let this process wait in a collective."""
        self._words[_PATIENCE] = nanoseconds

    def spend(self, times: Sequence[int]) -> None:
        """Add the nanoseconds of each of `PARTS` that a step took."""
        for word, time_ in zip(_PARTS, times, strict=True):
            self._words[word] += time_

    def close_window(self, window: StepWindow) -> None:
        """Report a window of steps; it replaces the one that is `PLACES` older."""
        place, words = window.number % PLACES * (_WINDOW // 8), self._windows
        words[place] = 0  # a reader ignores it until its number is there
        for at, value in enumerate((*window.parts, window.own), place + 1):
            words[at] = value
        words[place] = window.number

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
        for part in (self._words, self._windows, *self._phases):
            part.release()


def telemetry_name(arena: Path) -> str:
    """The name of the block that belongs to an arena; POSIX names have no directories, and are short."""
    name = str(arena).strip("/").replace("/", ".")
    return f"/{name}" if len(name) < LONGEST_NAME else f"/fastckpt.{hashlib.sha256(name.encode()).hexdigest()}"


def _made(name: str, size: int) -> tuple[posix_ipc.SharedMemory, int]:
    """Make the object again; returns its lock, too. Raises OSError, or posix_ipc.Error."""
    path = BLOCKS / name.strip("/")
    for _ in range(_TRIES):
        # A launch that sweeps has the lock for a moment, in which it removes the name: a new one, if that were there.
        end = time.monotonic() + _SWEEP
        while not (gone := remove_dead(path)) and time.monotonic() < end:
            time.sleep(1e-3)
        if not gone:
            unlink(name)  # though it may still be locked: this process owns its arena
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=size)
        with contextlib.suppress(OSError):
            lock = lock_of(memory.fd)
            if is_named(lock, path):
                return memory, lock
            close_lock(lock)
        memory.close_fd()  # before it was locked, a launch took it for one of a dead owner
    raise OSError(f"others have removed it {_TRIES} times")


def remove_dead(path: Path) -> bool:
    """Remove an object of this user with a dead owner, as its lock shows; returns whether it is gone."""
    try:
        lock = open_lock_of_others(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    try:
        if os.fstat(lock).st_uid != os.getuid() or not try_exclusive(lock):
            return False
        # With the lock: a process that makes it again has to wait, so that this is not the new one's name yet.
        if is_named(lock, path):
            path.unlink()
        return True
    except OSError:
        return False
    finally:
        close_lock(lock)


def unlink(name: str) -> None:
    """Remove the object if it is there; processes that have mapped it keep it."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except (posix_ipc.Error, OSError):
        pass  # there is none, or it is another user's
