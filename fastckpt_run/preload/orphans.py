"""Children that became this process's own while it was a subreaper, and that nobody else will reap."""

import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fastckpt._core.memory.processes import stat_of

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


@contextmanager
def subreaper() -> Iterator[None]:
    """Have orphans below this process become its children, while this lasts.

    Only then: processes that a worker leaves on purpose are the init process's to reap.
    """
    # An orphan goes to the nearest subreaper above it: so the template's grandchild becomes the agent's child.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@dataclass(frozen=True)
class Child:
    """A child of this process, as /proc shows it."""

    pid: int
    dead: bool
    session: int

    @classmethod
    def all(cls) -> Iterator[Self]:
        """The children of this process that are not reaped yet."""
        parent = os.getpid()
        for path in Path("/proc").glob("[0-9]*"):
            if fields := stat_of(path):
                state, ppid, _, session, *_ = fields
                if int(ppid) == parent:
                    yield cls(int(path.name), state in "ZX", int(session))

    def holds(self, file: str) -> bool:
        """Return whether it has ``file`` open, named as links in /proc name it."""
        # Another process may end, or close descriptors, while /proc is read.
        with suppress(OSError):
            return any(os.readlink(path) == file for path in Path(f"/proc/{self.pid}/fd").iterdir())  # noqa: PTH115
        return False


def kill_forks(template: int, descriptor: int) -> None:
    """Kill and reap a dead template's forks that hold ``descriptor`` open, or were about to fork one that does."""
    file = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    # Again and again: a fork that is under way may appear between the listing and the kill.
    while forks := [c for c in Child.all() if c.pid != template and (c.session == template or c.holds(file))]:
        for fork in forks:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(fork.pid, signal.SIGKILL)
                os.waitpid(fork.pid, 0)


def reap(workers: Collection[int]) -> None:
    """Reap dead children that were born in the session of a worker: never the workers themselves."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
    except ChildProcessError:
        return
    for child in Child.all():
        if child.dead and child.session in workers and child.pid not in workers:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
