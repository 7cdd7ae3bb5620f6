"""The memory of processes themselves, without what is shared memory or cached files."""

import contextlib
from pathlib import Path

import psutil


def own_memory(pid: int) -> int:
    """Bytes of a process and its descendants that only they have: heaps and stacks, each page counted once.

    Files and shared memory that they have mapped are not counted. What ends meanwhile counts as nothing.
    """
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_anonymous(process.pid) for process in family)


def _anonymous(pid: int) -> int:
    # Pss shares a page among those that have it, as forked workers do: the sum over a family is what it takes.
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    return 0
