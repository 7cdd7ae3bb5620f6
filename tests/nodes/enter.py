"""A launcher on a host: ``enter.py <first process of the host> <arguments of fastckpt-run>``.

A fork, which has imported all already, enters the namespaces of the host by itself; else nsenter executes this again.
"""

import ctypes
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from fastckpt._core import metrics
from tests.faults.launch import launch_from_fork, may_fork
from tests.nodes.hosts import nsenter

SPACES = ("net", "uts", "ipc", "pid", "mnt")
LONGEST = 120.0
"""Seconds of a pause."""


def enter(host: int) -> None:
    """Go into the namespaces of a process; it is a child of this process that is in its namespace of pids."""
    libc = ctypes.CDLL(None, use_errno=True)
    for space in [os.open(f"/proc/{host}/ns/{space}", os.O_RDONLY) for space in SPACES]:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)


def pause_in_a_phase() -> None:
    """Have the first process of this host that comes to a phase, for the n-th time, wait there, if that is asked."""
    if (asked := os.environ.get("NODES_PAUSE")) is None:
        return
    (phase, folder, nth), visits = asked.split(), itertools.count(1)

    def observe(entered: str, _: dict[str, Any]) -> None:
        if entered != phase or next(visits) < int(nth):
            return
        try:
            Path(folder, "reached").touch(exist_ok=False)
        except FileExistsError:
            return
        end = time.monotonic() + LONGEST
        while not Path(folder, "go").exists() and time.monotonic() < end:
            time.sleep(0.02)

    metrics.observe(observe)


def main(host: str, *arguments: str) -> None:
    if not may_fork():
        if host != "here":
            os.execvp("nsenter", nsenter(int(host), sys.executable, __file__, "here", *arguments))
    else:
        enter(int(host))
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
    pause_in_a_phase()
    launch_from_fork("", *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
