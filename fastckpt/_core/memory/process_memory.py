"""The memory of processes themselves, without what is shared memory or cached files."""

import contextlib
from pathlib import Path

import psutil


def own_memory(pid: int) -> int:
    """Bytes of a process and its descendants that they may come to have: heaps and stacks, of each of them.

    Files and shared memory that they have mapped are not counted. What ends meanwhile counts as nothing.
    """
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_anonymous(process.pid) for process in family)


def _anonymous(pid: int) -> int:
    # Pages that forked workers share are counted in each: when they exit, the interpreter writes to all of them, and
    # the kernel copies them. By Pss_Anon a job would be killed in its last second, at half as much again.
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) << 10
    return 0
