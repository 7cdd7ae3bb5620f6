"""Limits on a job: memory, or disk, before something fails or is killed, and processor time."""

import enum
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from fastckpt._core.byte_sizes import binary
from fastckpt._core.huge_pages import is_in_memory
from fastckpt._core.policy.memory_reserve import LEAST, RESERVE, reserve

CGROUPS, VMSTAT = Path("/sys/fs/cgroup"), Path("/proc/vmstat")
_V2, _V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
ON_DISK = "keep checkpoints in files on a disk with --fast-no-memory (without fastckpt-run: FASTCKPT_MEMORY=off)"


class MemoryLimit(enum.Enum):
    """Kind of the limit."""

    TMPFS = enum.auto()
    DISK = enum.auto()
    HOST = enum.auto()
    CGROUP = enum.auto()


@dataclass(frozen=True)
class Headroom:
    """Bytes that can still be taken, of how many, and the limit that they follow from."""

    free: int
    total: int
    limit: str
    kind: MemoryLimit

    def __str__(self) -> str:
        return f"{self.limit} has {binary(self.free)} free of {binary(self.total)}"

    @property
    def medium(self) -> str:
        """Medium that is limited."""
        return "the disk" if self.kind is MemoryLimit.DISK else "shared memory"

    def remedies(self, lacking: int) -> str:
        """Return what a user can do to make room for ``lacking`` bytes more."""
        raised = {
            MemoryLimit.TMPFS: f"Enlarge it ({_as_large_as(self.total + lacking, self.limit)})",
            MemoryLimit.DISK: "Free some of it",
            MemoryLimit.HOST: "End what takes it",
            MemoryLimit.CGROUP: "Raise it (docker: --memory; Kubernetes: resources.limits.memory)",
        }[self.kind]
        if self.kind is MemoryLimit.DISK:
            return f"{raised}, or name a directory on a larger disk with --fast-shm-dir"
        return f"{raised}, name another tmpfs with --fast-shm-dir, or {ON_DISK}"


def _as_large_as(size: int, mount: str) -> str:
    """Return options of containers for a tmpfs that has so many bytes beside the reserve, in a round number."""
    size += min(RESERVE, size // 16)
    mebibytes = 1 << (-(-size >> 20) - 1).bit_length()
    small = mebibytes < 1024
    docker, kubernetes = (
        (f"{mebibytes}m", f"{mebibytes}Mi") if small else (f"{mebibytes >> 10}g", f"{mebibytes >> 10}Gi")
    )
    return (
        f"docker: --shm-size={docker}; Kubernetes: emptyDir: {{medium: Memory, sizeLimit: {kubernetes}}} "
        f"mounted at {mount}"
    )


def headroom(directory: Path, share: int = LEAST) -> Headroom:
    """The tightest limit on files under ``directory``, so that 1/``share`` of it is left to others.

    On a tmpfs that is the tightest of the tmpfs, the host's memory and every cgroup above this process. Above the
    limit of a cgroup an allocation does not fail: the caller is killed. Pages of files on a disk are written back
    before that happens: there the disk alone is the limit.
    """
    limits = _limits(directory)
    share = LEAST if limits[0].kind is MemoryLimit.DISK else share
    return min((_less_reserve(found, share) for found in limits), key=lambda h: h.free)


def unreserved(directory: Path) -> Headroom:
    """The tightest limit on files under ``directory``, with the share that is to be left to others."""
    return min(_limits(directory), key=lambda h: h.free)


def _limits(directory: Path) -> list[Headroom]:
    status = os.statvfs(directory)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    if not lies_in_memory(directory):
        return [Headroom(free, total, f"the disk under {directory}", MemoryLimit.DISK)]
    memory = psutil.virtual_memory()
    host = Headroom(memory.available, memory.total, "the host's memory", MemoryLimit.HOST)
    tmpfs = Headroom(free, total, str(directory), MemoryLimit.TMPFS)
    return [tmpfs, host, *cgroup_memory()]


def lies_in_memory(directory: Path) -> bool:
    """Return whether new files in a directory are on a tmpfs; raises OSError if it is not a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return is_in_memory(descriptor)
    finally:
        os.close(descriptor)


def _less_reserve(found: Headroom, share: int) -> Headroom:
    return replace(found, free=max(0, found.free - reserve(found.total, share)))


def cgroup_memory() -> Iterator[Headroom]:
    """The limits on memory of the cgroups of this process."""
    for group in cgroups("memory"):
        for limit_name, usage_name in (_V2, _V1):
            try:
                limit, usage = (group / limit_name).read_text().strip(), (group / usage_name).read_text()
            except OSError:
                continue  # not this version of cgroups, or not visible in this container
            if limit != "max":
                cached = _reclaimable(group / "memory.stat")
                free, name = int(limit) - int(usage) + cached, f"the memory limit of cgroup {group}"
                yield Headroom(free, int(limit), name, MemoryLimit.CGROUP)


def cgroups(controller: str) -> Iterator[Path]:
    """The cgroups of this process that may have limits of a controller, of both versions, each before its parent."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for root in (CGROUPS, CGROUPS / "unified"):
                yield from _with_parents(root, path)
        elif controller in controllers.split(","):
            yield from _with_parents(CGROUPS / controller, path)


def processor_quotas() -> Iterator[float]:
    """The cores that the cgroups of this process may use at once, of those that limit them."""
    for group in cgroups("cpu"):
        try:
            quota, _, period = (group / "cpu.max").read_text().strip().partition(" ")
        except OSError:
            try:
                quota = (group / "cpu.cfs_quota_us").read_text().strip()
                period = (group / "cpu.cfs_period_us").read_text().strip()
            except OSError:
                continue  # not visible in this container
        if quota.isdigit():  # not "max", nor -1
            yield int(quota) / int(period or 100_000)


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    group = root / path.lstrip("/")
    yield from (each for each in (group, *group.parents) if each.is_relative_to(root))


def killed_for_memory() -> int:
    """Return the number of processes that the kernel has killed for lack of memory.

    They are those of this process's cgroup, or those of the whole host if the cgroup does not count them.
    """
    # The innermost group counts its members, whichever limit was reached; the counter moves before the signal is sent.
    files = (group / name for group in cgroups("memory") for name in ("memory.events", "memory.oom_control"))
    counters = (_counters(path).get("oom_kill") for path in (*files, VMSTAT))
    return next((count for count in counters if count is not None), 0)


def _reclaimable(statistics: Path) -> int:
    """Bytes of a group's page cache that the kernel drops before it kills; those of a tmpfs are not among them."""
    values = _counters(statistics)
    return sum(values.get(name, 0) for name in _file_pages(values))


def _counters(path: Path) -> dict[str, int]:
    """Numbers by name, of a file with one of them per line; none if it cannot be read."""
    try:
        return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
    except OSError:
        return {}


def _file_pages(values: dict[str, int]) -> tuple[str, str]:
    """Names of the counters of file pages, of the group and those below it."""
    if "total_inactive_file" in values:
        return "total_inactive_file", "total_active_file"
    return "inactive_file", "active_file"
