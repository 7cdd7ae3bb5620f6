"""Identifies a process beyond its number, which the kernel gives to others later."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import psutil


@dataclass(frozen=True)
class Process:
    """A process as it signs its files.

    Attributes:
        pid: Its number in its pid namespace.
        ticks: Start of the process, in clock ticks since the boot: no jump of the clock changes that.
        boot: The boot id of the kernel that it runs on.
        namespace: The number of its pid namespace.
        host: The name of its host.
        started: Start of the process, to be read by people.
        init: Start of the first process of its pid namespace, in clock ticks; 0 if that is not known. The kernel gives
            the number of a namespace to the next one: to that of a container which is restarted.
    """

    pid: int
    ticks: int
    boot: str
    namespace: int
    host: str = ""
    started: str = ""
    init: int = 0

    @classmethod
    def current(cls) -> Self:
        """This process."""
        pid, started = os.getpid(), time.localtime(psutil.Process().create_time())
        readable = time.strftime("%Y-%m-%d %H:%M:%S", started)
        return cls(pid, _ticks(pid), boot_id(), pid_namespace(), socket.gethostname(), readable, _init())

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process that has this number here and now."""
        return cls(pid, _ticks(pid), boot_id(), pid_namespace(), init=_init())

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self | None:
        """The process in a record, as `to_record` made it; None if there is none in it."""
        match record:
            case {"pid": int(pid), "ticks": int(ticks), "boot": str(boot), "namespace": int(namespace)}:
                host, started, init = (record.get(name) for name in ("host", "started", "init"))
                texts = str(host or "")[:100], str(started or "")[:100]
                return cls(pid, ticks, boot, namespace, *texts, init if isinstance(init, int) else 0)
        return None

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    def is_here(self) -> bool:
        """Return whether its pid is valid here: in this boot of this kernel, and in this pid namespace."""
        same = (self.boot, self.namespace) == (boot_id(), pid_namespace())
        return same and (0 in (self.init, _init()) or self.init == _init())

    def is_alive(self) -> bool:
        """Return whether it runs, as far as this process can see."""
        return self.is_here() and self.ticks == _ticks(self.pid) > 0

    def is_dead(self) -> bool:
        """Return whether it has certainly ended; False for one in another pid namespace that may be alive."""
        # Of two namespaces with one number, the earlier one is gone, with all of its processes.
        return (self.boot, self.namespace) == (boot_id(), pid_namespace()) and not self.is_alive()

    def kill(self) -> bool:
        """Kill it, if it runs here for this user; whether that was done. Never hits another process of its number."""
        return bool(signal_together([self], signal.SIGKILL))

    def left(self) -> list["Process"]:
        """Return the live processes of its session after it, the leader, has died: loader workers, for example.

        The kernel gives the number of a session to nobody while somebody is in it. Python's resource tracker is left
        out: it ends after the others, and removes the semaphores that they have left.
        """
        if not self.is_here() or _ticks(self.pid):
            return []
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        found = [Process.of(pid) for pid in pids if stat_of(Path(f"/proc/{pid}"))[3:4] == [str(self.pid)]]
        return [each for each in found if each.ticks >= self.ticks and not _is_tracker(each.pid)]

    def __str__(self) -> str:
        elsewhere = "" if self.is_here() or self.boot != boot_id() else " of another pid namespace"
        return f"process {self.pid}{elsewhere} on {self.host or 'this host'}, started {self.started or 'some time ago'}"


def signal_together(processes: Sequence[Process], number: int) -> list[Process]:
    """Send a signal to processes that run here for this user, with nothing in between; never to others of their pids.

    Returns the processes that it was sent to.
    """
    with contextlib.ExitStack() as on_exit:
        handles = list[tuple[Process, int]]()
        for process in processes:
            if process.pid <= 1 or process.pid == os.getpid():
                continue
            try:
                handle = os.pidfd_open(process.pid)
            except (OSError, OverflowError):
                continue
            on_exit.callback(os.close, handle)
            # The number may be another's now: the handle stays with the process that had it when it was opened.
            if process.is_alive() and _user(process.pid) == os.getuid():
                handles.append((process, handle))
        for _, handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    return [process for process, _ in handles]


@cache
def boot_id() -> str:
    """Return the kernel's id of this boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """The number of the pid namespace of this process; 0 where the kernel does not report it."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


@cache
def _init() -> int:
    return _ticks(1)


def stat_of(process: Path) -> list[str]:
    """Return the fields after the name in the stat file of a process or thread in /proc; empty if there is none."""
    try:
        text = (process / "stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].decode().split()  # the name may hold anything


def _ticks(pid: int) -> int:
    """Return the start of a process, in clock ticks since the boot; 0 if there is none, or it is a zombie."""
    fields = stat_of(Path(f"/proc/{pid}"))
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _user(pid: int) -> int:
    try:
        return psutil.Process(pid).uids().real
    except psutil.Error:
        return -1


def own_memory(pid: int) -> int:
    """Bytes that a process and its descendants may come to have: heaps and stacks, of each of them.

    Files and shared memory that they have mapped are not counted. A process that ends meanwhile counts as nothing.
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
