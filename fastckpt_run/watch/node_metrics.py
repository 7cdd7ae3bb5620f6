"""Metrics of this host and of the agent: processors, memory, network, and file systems, which may hang."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from fastckpt._core.memory.headroom import headroom
from fastckpt._core.storage.store import is_url
from fastckpt_run.watch.metric_values import MetricValues

INTERVAL = 10.0
"""Seconds between two looks at a host."""
STALE = 6
"""Intervals after which a probe's values are not shown any more: it does not come back."""


class Probe:
    """Looks in a thread of its own at file systems and drivers, which may hang. Nobody waits for it.

    Args:
        name: Of the thread.
        look: Finds the values; raises OSError where there are none.
        interval: Seconds between two looks.
    """

    def __init__(self, name: str, look: Callable[[], MetricValues], interval: float = INTERVAL) -> None:
        self._look, self._interval = look, interval
        self._found, self._at = MetricValues(), -1e9
        self._wakes, self._ends = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """Begin to look."""
        self._thread.start()

    def newest(self) -> MetricValues:
        """Return the values of the last look; none if that is long ago."""
        return self._found if time.monotonic() - self._at < STALE * self._interval else MetricValues()

    def hurry(self) -> None:
        """Look again at once: there is something new to look at."""
        self._wakes.set()

    def close(self) -> None:
        """Look no more; one that hangs is left behind."""
        self._ends = True
        self._wakes.set()

    def _run(self) -> None:
        while not self._ends:
            self._wakes.clear()
            try:
                self._found, self._at = self._look(), time.monotonic()
            except OSError:
                pass  # shown by its absence, once the last values are old
            self._wakes.wait(self._interval)


class HostMetrics:
    """Metrics of the host and the agent from /proc: quick, so that they need no thread."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._busy, self._all = _processor_times()
        self._found, self._due = MetricValues(), 0.0

    def collect(self) -> MetricValues:
        """The values; those of the host are at most `INTERVAL` old."""
        found = MetricValues()
        with self._process.oneshot():
            times = self._process.cpu_times()
            found.add("agent_processor_seconds_total", times.user + times.system)
            found.add("agent_memory_bytes", self._process.memory_info().rss)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + INTERVAL
            self._found = self._host()
        found.update(self._found)
        return found

    def _host(self) -> MetricValues:
        found = MetricValues()
        busy, all_ = _processor_times()
        if all_ > self._all:
            found.add("node_processor_ratio", min(1.0, max(0.0, (busy - self._busy) / (all_ - self._all))))
        self._busy, self._all = busy, all_
        memory = psutil.virtual_memory()
        found.add("node_memory_bytes", memory.total - memory.available, "used")
        found.add("node_memory_bytes", memory.available, "free")
        cards = {name: card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"}
        found.add("node_network_bytes_total", sum(card.bytes_recv for card in cards.values()), "received")
        found.add("node_network_bytes_total", sum(card.bytes_sent for card in cards.values()), "sent")
        return found


def _processor_times() -> tuple[float, float]:
    """Seconds that processors were busy, and all seconds."""
    times = psutil.cpu_times()
    # `guest` is a part of `user` already.
    all_ = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return all_ - times.idle - getattr(times, "iowait", 0.0), all_


def file_systems(arenas: Path, of_directories: Callable[[], Mapping[str, Path]]) -> MetricValues:
    """The values of the file systems that a job uses; may hang where they do.

    Args:
        arenas: The directory under which arenas are made.
        of_directories: The arena of each checkpoint directory.
    """
    found = MetricValues()
    _add_space(found, "node_tmpfs_bytes", arenas)
    found.add("node_headroom_bytes", max(0, headroom(arenas).free))
    size = 0
    for directory, arena in of_directories().items():
        size += _size(arena)
        if not is_url(directory):
            try:
                _add_space(found, "node_disk_bytes", Path(directory), directory)
            except OSError:
                continue  # it is gone: the others are not
    found.add("arena_bytes", size)
    return found


def _add_space(found: MetricValues, name: str, path: Path, *labels: str) -> None:
    space = os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    found.add(name, (space.f_blocks - space.f_bfree) * space.f_frsize, *labels, "used")
    found.add(name, free, *labels, "free")


def _size(folder: Path) -> int:
    """Bytes that the files of an arena take; files come and go meanwhile."""
    size = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    size += _size(Path(entry.path))
                else:
                    size += _blocks(entry)
    except OSError:
        pass  # it was removed, or renamed, and counts no more
    return size


def _blocks(entry: "os.DirEntry[str]") -> int:
    try:
        return 512 * entry.stat(follow_symlinks=False).st_blocks
    except OSError:
        return 0
