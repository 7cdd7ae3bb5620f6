"""What workers do, as the kernel tells it: whether they compute, wait, are stopped or gone."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_WINDOW = 10.0
"""Seconds over which a worker's processor time is compared."""
_BUSY = 0.02
"""Seconds of processor time in a window, by a worker and its children, from which on it does something."""
_TICK = 1 / os.sysconf("SC_CLK_TCK")


def state_of(pid: int) -> str:
    """The letter that the kernel gives a process's state; empty if it has exited."""
    fields = _stat(pid)
    return fields[0] if fields and fields[0] not in "ZX" else ""


def processor_times(leaders: Collection[int]) -> dict[int, float]:
    """Seconds of processor time that each session has had, by its leader; of those that ended, those waited for."""
    times = dict.fromkeys(leaders, 0.0)
    for fields in _all_stats():
        session = int(fields[3])
        if session in times:
            times[session] += sum(map(int, fields[11:15])) * _TICK
    return times


class Activity:
    """When workers have last done anything."""

    def __init__(self, leaders: Collection[int], now: float) -> None:
        self._leaders = leaders
        self._last = self._sampled = now
        self._times: dict[int, float] = {}

    def idle(self, now: float, spoken: float) -> float:
        """Seconds for which none has said or done anything; ``spoken`` is when one said something."""
        self._last = max(self._last, spoken)
        if now - spoken < _WINDOW:
            self._times = {}
        elif not self._times or now - self._sampled >= _WINDOW:
            self._sample(now)
        return now - self._last

    def _sample(self, now: float) -> None:
        before, self._times, self._sampled = self._times, processor_times(self._leaders), now
        busy = any(seconds - before.get(leader, 0.0) >= _BUSY for leader, seconds in self._times.items())
        if not before or busy or any(state_of(leader) == "D" for leader in self._leaders):
            self._last = now


def _all_stats() -> Iterator[list[str]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (fields := _stat(int(path.name))):
            yield fields


def _stat(pid: int) -> list[str]:
    """What follows the name of a process in its stat file; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].decode().split()  # the name may hold anything
