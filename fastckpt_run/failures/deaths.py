"""Notice at once which workers have died, without reaping them."""

import os
import selectors
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from signal import Signals

OWN_FAULTS = {
    Signals.SIGABRT,
    Signals.SIGBUS,
    Signals.SIGFPE,
    Signals.SIGILL,
    Signals.SIGSEGV,
    Signals.SIGSYS,
    Signals.SIGTRAP,
}
"""Signals that a process gets for its own faults."""


@dataclass(frozen=True)
class Death:
    """A worker that has exited; its code is negative for a signal, None if only torch can read it."""

    local_rank: int
    pid: int
    exitcode: int | None


def describe(exitcode: int | None) -> str:
    """An exit code in words."""
    if exitcode is None or exitcode >= 0:
        return f"exit code {'unknown' if exitcode is None else exitcode}"
    with suppress(ValueError):
        return Signals(-exitcode).name
    return f"signal {-exitcode}"


def is_from_outside(exitcode: int) -> bool:
    """Return whether a process was killed by a signal that processes do not get for their own faults."""
    return exitcode < 0 and -exitcode not in OWN_FAULTS


def peek(pid: int) -> int | None:
    """The exit code of a child that is dead but not reaped, which it stays; else None."""
    try:
        # WNOWAIT leaves the zombie, and with it the exit code for torch and the pid for kill_group.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    # It is not a child any more: torch has reaped it, and has its exit code.
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class DeathWatch:
    """Waits for the deaths of a group of children that are not reaped yet."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._selector = selectors.DefaultSelector()
        for local_rank, pid in pids.items():
            # Without a pidfd (reaped already, or an old kernel) torch's polling still finds the death.
            with suppress(OSError):
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (local_rank, pid))

    @property
    def is_watching(self) -> bool:
        """True if some of the children are not known to have died."""
        return bool(self._selector.get_map())

    def wait(self, timeout: float) -> list[Death]:
        """New deaths, as soon as there is one; empty after ``timeout`` seconds without."""
        if not self._selector.get_map():
            # None is registered, or the selector was closed: torch's polling finds the deaths.
            time.sleep(timeout)
            return []
        deaths = []
        for key, _ in self._selector.select(timeout):
            local_rank, pid = key.data
            # A pidfd stays readable for ever: each death is reported once.
            self._drop(key)
            deaths.append(Death(local_rank, pid, peek(pid)))
        return deaths

    def close(self) -> None:
        """Give up the file descriptors; may be called again."""
        if self._selector.get_map() is None:
            return
        for key in list(self._selector.get_map().values()):
            self._drop(key)
        self._selector.close()

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
