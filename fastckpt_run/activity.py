"""What workers do, as the kernel tells it: whether they compute, wait, are stopped or gone."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_WINDOW = 10.0
"""Seconds over which it is compared what a worker and its children have done."""
_BUSY = 0.01
"""Share of a processor with which a thread does something. One that waits in gloo polls, with 0.002."""
_MOVED = 10_000
"""Bytes per second that a process reads and writes when it does something: to files, pipes and through TLS."""
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")

Deeds = dict[tuple[int, str], float]
"""What has been done so far by each thread, and by the children of each process that have ended; in units of what
counts as doing something for a second."""


def state_of(pid: int) -> str:
    """The letter that the kernel gives a process's state; empty if it has exited."""
    fields = _stat(_PROC / str(pid))
    return fields[0] if fields and fields[0] not in "ZX" else ""


def processor_times(leaders: Collection[int]) -> dict[int, float]:
    """Seconds of processor time that each session has had, by its leader."""
    times = dict.fromkeys(leaders, 0.0)
    for _, fields in _members(leaders):
        times[int(fields[3])] += sum(map(int, fields[11:15])) * _TICK
    return times


class Activity:
    """When workers, each the leader of a session, have last done anything."""

    def __init__(self, leaders: Collection[int], now: float) -> None:
        self._leaders = leaders
        self._last = self._sampled = now
        self._deeds: Deeds = {}

    def idle(self, now: float, spoken: float) -> float:
        """Seconds for which none has said or done anything; ``spoken`` is when one said something."""
        self._last = max(self._last, spoken)
        if now - spoken < _WINDOW:
            self._deeds = {}
        elif not self._deeds or now - self._sampled >= _WINDOW:
            self._sample(now)
        return now - self._last

    def _sample(self, now: float) -> None:
        before, self._deeds = self._deeds, _deeds(self._leaders)
        passed, self._sampled = now - self._sampled, now
        done = max([much - before.get(what, 0.0) for what, much in self._deeds.items()], default=0.0)
        if not before or done > passed or any(state_of(leader) == "D" for leader in self._leaders):
            self._last = now


def _deeds(leaders: Collection[int]) -> Deeds:
    found: Deeds = {}
    for process, fields in _members(leaders):
        pid = int(process.name)
        found[pid, "children"] = sum(map(int, fields[13:15])) * _TICK / _BUSY
        found[pid, "bytes"] = _moved(process) / _MOVED
        for thread in _numbered(process / "task"):
            if own := _stat(thread):
                found[int(thread.name), "time"] = sum(map(int, own[11:13])) * _TICK / _BUSY
    return found


def _members(leaders: Collection[int]) -> Iterator[tuple[Path, list[str]]]:
    """All processes of these sessions."""
    for process in _numbered(_PROC):
        if (fields := _stat(process)) and int(fields[3]) in leaders:
            yield process, fields


def _numbered(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _stat(process: Path) -> list[str]:
    """What follows the name of a process or thread in its stat file; empty if there is none."""
    try:
        text = (process / "stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].decode().split()  # the name may hold anything


def _moved(process: Path) -> int:
    """Bytes that a process has read and written, as far as it may be known."""
    try:
        lines = (process / "io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
