"""How much shared memory can be taken before something fails or is killed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
RESERVE = 64 << 20
"""Bytes left to all others, or a twentieth of the limit if that is less."""


@dataclass(frozen=True)
class Headroom:
    """Bytes that can still be taken, of how many, and the limit that says so."""

    free: int
    total: int
    limit: str

    def __str__(self) -> str:
        return f"{self.limit} has {self.free / 2**30:.2f} GiB free"


def headroom(shm_dir: Path) -> Headroom:
    """The tightest of the tmpfs under ``shm_dir``, the host's memory and every cgroup above this process.

    Above the limit of a cgroup an allocation on a tmpfs does not fail: the caller is killed.
    """
    memory = psutil.virtual_memory()
    host = Headroom(memory.available, memory.total, "the host's memory")
    return min((_less_reserve(found) for found in (_tmpfs(shm_dir), host, *_cgroups())), key=lambda h: h.free)


def _less_reserve(found: Headroom) -> Headroom:
    return replace(found, free=max(0, found.free - min(RESERVE, found.total // 20)))


def _tmpfs(shm_dir: Path) -> Headroom:
    status = os.statvfs(shm_dir)
    return Headroom(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize, str(shm_dir))


def _cgroups() -> Iterator[Headroom]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for root in (CGROUPS, CGROUPS / "unified"):
                yield from _ancestors(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _ancestors(CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _ancestors(root: Path, path: str, limit_name: str, usage_name: str) -> Iterator[Headroom]:
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            return
        try:
            limit, usage = (directory / limit_name).read_text().strip(), (directory / usage_name).read_text()
        except OSError:
            continue  # not this version of cgroups, or not visible in this container
        if limit != "max":
            cached = _reclaimable(directory / "memory.stat")
            yield Headroom(int(limit) - int(usage) + cached, int(limit), f"the memory limit of cgroup {directory}")


def _reclaimable(statistics: Path) -> int:
    """Bytes of a group's page cache that the kernel drops before it kills; those of a tmpfs are not among them."""
    try:
        pairs = (line.split() for line in statistics.read_text().splitlines())
        values = {name: int(value) for name, value in pairs}
    except OSError:
        return 0
    return sum(values.get(name, 0) for name in _file_pages(values))


def _file_pages(values: dict[str, int]) -> tuple[str, str]:
    """Names of the counters of file pages, of the group and those below it."""
    if "total_inactive_file" in values:
        return "total_inactive_file", "total_active_file"
    return "inactive_file", "active_file"
