"""Checks of this host: cores, NUMA, pages, clock, permission to read processes, and GPUs."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from fastckpt._core.byte_sizes import binary
from fastckpt._core.huge_pages import HUGE, window
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, warning
from fastckpt_run.watch.gpu_metrics import GpuMetrics

_NODES = Path("/sys/devices/system/node")
_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
_SCOPES = {"0": "processes of this user", "1": "a process's parents", "2": "root alone", "3": "nobody"}


def cores(subject: Subject) -> Iterator[Diagnosis]:
    """The cores that this process may use: as many as ranks, at least."""
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    text = f"{usable} of {all_cores} may be used"
    if usable < all_cores:
        text += " (by a cpuset, taskset or numactl); workers inherit that"
    if usable < subject.ranks:
        remedy = "Give each rank a core, and more for its data loader; in Slurm by --cpus-per-task, of sbatch and srun"
        yield warning("cores", f"{text}: fewer than the {subject.ranks} ranks of this node", remedy)
    else:
        yield ok("cores", text)


def memory_nodes(_: Subject) -> Iterator[Diagnosis]:
    """NUMA: the cores and the memory of each node."""
    nodes = sorted((path for path in _NODES.glob("node[0-9]*")), key=lambda path: int(path.name.removeprefix("node")))
    if not nodes:
        yield ok("NUMA", "the kernel knows no nodes")
        return
    found = [(path.name, (path / "cpulist").read_text().strip(), _memory(path)) for path in nodes]
    text = "; ".join(f"{name}: cores {cpus or 'none'}, {binary(memory)}" for name, cpus, memory in found)
    if any(cpus and not memory for _, cpus, memory in found):
        yield warning("NUMA", f"{text}: cores without memory of their own", "Fill its memory channels, or disable NUMA")
    elif len(found) > 1:
        yield ok("NUMA", f"{text}; --numa-binding of torchrun keeps workers near their GPUs")
    else:
        yield ok("NUMA", text)


def huge_pages(_: Subject) -> Iterator[Diagnosis]:
    """Large pages: of processes by an option of the kernel, of shared memory by a request for each image."""
    private = _chosen(_PAGES / "enabled")
    shared = _collapses()
    text = f"of processes: {private}; of shared memory: {'on request' if shared else 'not on request'}"
    if private == "never" or not shared:
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, and Linux 6.1 or newer"
        yield warning("huge pages", f"{text}: copies of checkpoints take more of a processor", remedy)
    else:
        yield ok("huge pages", text)


def clock(_: Subject) -> Iterator[Diagnosis]:
    """The monotonic clock, by which all waits go."""
    resolution = time.get_clock_info("monotonic").resolution
    source = _read(_CLOCK) or "unknown"
    text = f"monotonic, {resolution:.0e} s, from {source}"
    if source in _SLOW_CLOCKS:
        yield warning(
            "clock", f"{text}: reading it takes a microsecond", "Boot with clocksource=tsc if the processor has one"
        )
    else:
        yield ok("clock", f"{text}; clocks of other hosts need not agree with it")


def traces(_: Subject) -> Iterator[Diagnosis]:
    """Find out which users may trace processes. Stacks of hangs need no such right: workers write them themselves."""
    scope = _read(_PTRACE)
    who = _SCOPES.get(scope, "processes of this user") if scope else "processes of this user"
    yield ok("ptrace", f"{who} may trace a worker; stacks of hangs need no such right, py-spy and gdb do")


def gpus(_: Subject) -> Iterator[Diagnosis]:
    """GPUs, as the driver's management library counts them."""
    metrics = GpuMetrics()
    names = {labels[0] for _, labels, _ in metrics.collect()}
    yield ok("GPUs", f"{len(names)} found" if names else f"none found: {metrics.why_none}")


def _memory(node: Path) -> int:
    """Bytes of a node's memory."""
    for line in (node / "meminfo").read_text().splitlines():
        if "MemTotal:" in line:
            return int(line.split()[-2]) * 1024
    return 0


def _collapses() -> bool:
    """Return whether a large page can be had in shared memory without an option of its mount."""
    descriptor = os.memfd_create("fastckpt-doctor", os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, bytes(HUGE), 0)
        with window(descriptor, 0, HUGE) as mapped:
            return mapped.collapse()
    finally:
        os.close(descriptor)


def _chosen(file: Path) -> str:
    """The choice in brackets in a file of the kernel."""
    text = _read(file)
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
