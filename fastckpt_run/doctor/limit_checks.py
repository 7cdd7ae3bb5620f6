"""Checks of limits for this process and its children: cgroups of both versions, and limits of resources."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from fastckpt._core.byte_sizes import binary
from fastckpt._core.memory.headroom import cgroup_memory as memory_limits
from fastckpt._core.memory.headroom import cgroups, processor_quotas
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, problem, warning

FEW_FILES, FEW_PROCESSES, NO_PROCESSES = 1024, 2048, 64
_CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


def cgroup_memory(_: Subject) -> Iterator[Diagnosis]:
    """Memory that the cgroups of this process may take; files in a tmpfs count."""
    total = psutil.virtual_memory().total
    limits = [each for each in memory_limits() if each.total < total]
    if limits:
        tightest = min(limits, key=lambda each: each.free)
        text = f"{tightest}; what is in a tmpfs counts, and above it processes are killed"
        if tightest.free < tightest.total // 10:
            yield warning("cgroup memory", text, tightest.remedies(tightest.total // 10 - tightest.free))
        else:
            yield ok("cgroup memory", text)
    else:
        yield ok("cgroup memory", f"no limit below the host's {binary(total)}")
    for group, text in _values("memory", "memory.high"):
        if text.isdigit() and int(text) < total:
            yield warning(
                "cgroup memory",
                f"above {binary(int(text))} (memory.high of {group}) the kernel makes processes wait for memory",
                "Set memory.high as high as memory.max, or have checkpoints take less than it",
            )


def cgroup_processor(_: Subject) -> Iterator[Diagnosis]:
    """Processor time that the cgroups of this process may take."""
    limits = [*processor_quotas()]
    seen = len(os.sched_getaffinity(0))
    if not limits or min(limits) >= seen:
        yield ok("cgroup processor", f"no limit below the {seen} cores that this process may use")
    elif min(limits) < 1:
        yield warning(
            "cgroup processor",
            f"{min(limits):g} cores of {seen}: workers are stopped for most of each 100 ms, and so are heartbeats",
            "Raise it (docker: --cpus; Kubernetes: resources.limits.cpu)",
        )
    else:
        yield ok("cgroup processor", f"{min(limits):g} cores of the {seen} that processes see")


def cgroup_processes(_: Subject) -> Iterator[Diagnosis]:
    """Processes and threads that the cgroups of this process may have."""
    left, text = min(_rooms(), default=(None, ""))
    remedy = "Raise it (docker: --pids-limit; Kubernetes: podPidsLimit of the kubelet; systemd: TasksMax)"
    if left is None:
        yield ok("cgroup processes", "no limit on processes and threads")
    elif left < NO_PROCESSES:
        yield problem("cgroup processes", f"{text}: a job of one node takes about {NO_PROCESSES}", remedy)
    elif left < FEW_PROCESSES:
        yield warning("cgroup processes", f"{text}; loader workers and threads count", remedy)
    else:
        yield ok("cgroup processes", text)


def resource_limits(_: Subject) -> Iterator[Diagnosis]:
    """Limits that shells and service managers set (ulimit)."""
    yield from (_open_files(), _processes_of_user(), _locked_memory(), _core_dumps())


def _open_files() -> Diagnosis:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} open files, at most {_limit(hard)}"
    if _is_below(soft, FEW_FILES):
        remedy = "Raise it: ulimit -n 65536 (docker: --ulimit nofile=65536; systemd: LimitNOFILE)"
        return warning("open files", f"{text}: each image, worker and connection takes one", remedy)
    return ok("open files", text)


def _processes_of_user() -> Diagnosis:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    text = f"{_limit(soft)} processes and threads of this user"
    if _is_below(soft, FEW_PROCESSES) and os.getuid():  # the kernel does not hold root to it
        return warning("processes of the user", text, "Raise it: ulimit -u 65536 (systemd: LimitNPROC)")
    return ok("processes of the user", text)


def _locked_memory() -> Diagnosis:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if soft == resource.RLIM_INFINITY else binary(soft)
    if Path("/sys/class/infiniband").is_dir() and soft != resource.RLIM_INFINITY:
        remedy = "Raise it: ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
        return warning(
            "locked memory", f"{text}: NCCL registers its buffers with the RDMA devices of this host", remedy
        )
    return ok("locked memory", f"{text}; checkpoints need none, NCCL over RDMA does")


def _core_dumps() -> Diagnosis:
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    pattern = _CORE_PATTERN.read_text().strip()
    if soft == 0 or pattern.startswith("|"):
        return ok("core dumps", "written to no file here" if soft == 0 else f"given to {pattern[1:].split()[0]}")
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{binary(soft)} at most"
    return warning(
        "core dumps",
        f"{limit}, as {pattern}: a worker that crashes writes its memory to a file before it is dead",
        "ulimit -c 0, unless you want them",
    )


def _rooms() -> Iterator[tuple[int, str]]:
    for group, text in _values("pids", "pids.max"):
        if text.isdigit():
            used = int((group / "pids.current").read_text())
            yield int(text) - used, f"{used:,} of {int(text):,} processes and threads of cgroup {group} are taken"


def _values(controller: str, file: str) -> Iterator[tuple[Path, str]]:
    """The content of a file in each cgroup of this process that has it."""
    for group in cgroups(controller):
        try:
            yield group, (group / file).read_text().strip()
        except OSError:
            continue  # the other version, or not visible in this container


def _limit(number: int) -> str:
    return "no limit on" if number == resource.RLIM_INFINITY else f"{number:,}"


def _is_below(number: int, least: int) -> bool:
    return number != resource.RLIM_INFINITY and number < least
