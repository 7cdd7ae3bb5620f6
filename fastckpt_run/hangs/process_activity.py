"""Activity of worker processes according to the kernel: whether they compute, wait, are stopped or gone."""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from fastckpt._core.memory.processes import stat_of

_WINDOW = 10.0
"""Seconds over which the activity of a worker and its children is compared."""
_BUSY = 0.01
"""Share of a processor with which a thread does something. One that waits in gloo polls, with 0.002."""
_MOVED = 10_000
"""Bytes per second that a process reads and writes when it does something: to files, pipes and through TLS."""
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_WRITES = {"x86_64": ("1", "20"), "aarch64": ("64", "66")}.get(os.uname().machine, ())
"""The numbers of the system calls write and writev."""

Work = dict[tuple[int, str], float]
"""Work done so far by each thread, and by the ended children of each process; in units of
the least work that counts as activity for a second."""


def state_of(pid: int) -> str:
    """The letter that the kernel gives a process's state; empty if it has exited."""
    fields = stat_of(_PROC / str(pid))
    return fields[0] if fields and fields[0] not in "ZX" else ""


def unread_output(pid: int) -> str:
    """Return the file that a process waits to write to because nobody reads it, such as ``/dev/pts/0``; empty for none.

    That is its standard output or error, by whatever descriptor, if it is a pipe, a socket or a terminal. The kernel
    shows it to processes that may trace this one (ptrace(2), PTRACE_MODE_ATTACH), as the one that has started it
    may.
    """
    process = _PROC / str(pid)
    for thread in _numbered(process / "task"):
        with contextlib.suppress(OSError):  # it is gone, or may not be traced
            call = (thread / "syscall").read_text().split()
            if call[0] in _WRITES:
                written = process / "fd" / str(int(call[1], 16))
                standard = [each for number in "12" if (each := process / "fd" / number).exists()]
                if not written.is_file() and any(map(written.samefile, standard)):
                    return str(written.readlink())
    return ""


def processor_times(workers: Collection[int]) -> dict[int, float]:
    """Seconds of processor time that each worker has had, with the processes that it started."""
    times = dict.fromkeys(workers, 0.0)
    for worker, _, fields in _members(workers):
        # utime, stime, cutime and cstime of proc_pid_stat(5), whose numbering begins with the state here.
        times[worker] += sum(map(int, fields[11:15])) * _TICK
    return times


class Activity:
    """The last time at which each worker did anything."""

    def __init__(self, workers: Collection[int], now: float) -> None:
        self._last = dict.fromkeys(workers, now)
        self._spoken = self._sampled = now
        self._work: dict[int, Work] = {}
        self._runnable: set[int] = set()

    def idle(self, now: float, spoken: float) -> float:
        """Seconds for which none has reported or done anything; ``spoken`` is when one last reported."""
        self._spoken = max(self._spoken, spoken)
        if now - spoken < _WINDOW:
            self._work = {}
        elif not self._work or now - self._sampled >= _WINDOW:
            self._sample(now)
        return now - max([self._spoken, *self._last.values()])

    def idle_of(self, worker: int, now: float) -> float:
        """Seconds for which none has reported, and this one has done nothing; as the last `idle` has found."""
        return now - max(self._spoken, self._last[worker])

    def _sample(self, now: float) -> None:
        before, runnable = self._work, self._runnable
        self._work, waiting = _work(self._last)
        self._runnable = {thread for states in waiting.values() for thread, state in states.items() if state == "R"}
        passed, self._sampled = now - self._sampled, now
        for worker, work in self._work.items():
            past, states = before.get(worker, {}), waiting[worker]
            done = max([much - past.get(what, 0.0) for what, much in work.items()], default=0.0)
            # A thread that was runnable at both looks wants a processor
            # and gets none: the host is overloaded, not the job hung.
            starved = not runnable.isdisjoint(thread for thread, state in states.items() if state == "R")
            if not before or done > passed or starved or "D" in states.values():
                self._last[worker] = now


def _work(workers: Collection[int]) -> tuple[dict[int, Work], dict[int, dict[int, str]]]:
    """Work done so far by each worker, and its threads that wait for a disk (D) or a processor (R)."""
    found: dict[int, Work] = {worker: {} for worker in workers}
    waiting: dict[int, dict[int, str]] = {worker: {} for worker in workers}
    for worker, pid, fields in _members(workers):
        process, work = _PROC / str(pid), found[worker]
        work[pid, "children"] = sum(map(int, fields[13:15])) * _TICK / _BUSY
        work[pid, "bytes"] = _moved(process) / _MOVED
        for thread in _numbered(process / "task"):
            if own := stat_of(thread):
                work[int(thread.name), "time"] = sum(map(int, own[11:13])) * _TICK / _BUSY
                if own[0] in "DR":
                    waiting[worker][int(thread.name)] = own[0]
    return found, waiting


def _members(workers: Collection[int]) -> Iterator[tuple[int, int, list[str]]]:
    """All processes of these workers' sessions, and their descendants, each after its worker."""
    everything = {int(process.name): fields for process in _numbered(_PROC) if (fields := stat_of(process))}
    for pid, fields in everything.items():
        above = pid
        # By session first: orphans of a worker have init as their parent, and the worker's session still.
        while above not in workers and above in everything:
            session = int(everything[above][3])
            above = session if session in workers else int(everything[above][1])
        if above in workers:
            yield above, pid, fields


def _numbered(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _moved(process: Path) -> int:
    """Bytes that a process has read and written, as far as it may be known."""
    try:
        lines = (process / "io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
