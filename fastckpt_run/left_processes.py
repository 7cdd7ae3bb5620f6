"""Processes that dead workers leave in their groups: they are killed, but some programs may clean up for a moment."""

import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Timer

from fastckpt._core.memory.processes import Process, signal_together, stat_of

MOMENT = 2.0
"""Seconds that programs which a dead worker has left have to end by themselves."""
START_MOMENT = 1.0
"""Seconds that the next workers wait, at most, for killed processes and for resource trackers. The former hold ports
and devices until the kernel has ended them; the latter's segments may have names that workers take again."""
_TRACKER = b"resource_tracker"
"""Part of the command of a resource tracker, of multiprocessing and of loky."""
_COMPUTES = re.compile(r".*python.*|[a-z]*sh|")
"""Names of programs that may go on with a worker's work: they are killed at once. Shells start others."""
_PAUSE = 0.002
_ROUNDS = 20
"""Looks for processes that were forked meanwhile, before all of a group is killed."""


def kill_group(leader: int) -> None:
    """Kill the unreaped child ``leader`` and its descendants, but for programs that clean up."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(leader, signal.SIGKILL)
    kill_members([leader])


def kill_children(pids: Collection[int]) -> None:
    """Kill the groups of these processes, if they are children of this one."""
    for pid in pids:
        if stat_of(Path(f"/proc/{pid}"))[1:2] == [str(os.getpid())]:
            kill_group(pid)


def kill_members(groups: Collection[int], program: str = "") -> dict[Process, bool]:
    """Kill the processes in the groups of dead or dying workers, but for programs that clean up.

    Returns those that may live for a moment, and whether the next workers wait for each: the killed, resource trackers.

    Args:
        groups: The pids of the workers.
        program: The name of the program that the workers run: their forks compute, too.
    """
    killed = set[Process]()
    for _ in range(_ROUNDS):
        members = members_of(groups, program)
        if not (doomed := {each for each, kind in members.items() if kind is None} - killed):
            cleaning = {each: kind for each, kind in members.items() if kind is not None}
            return dict.fromkeys(killed, True) | cleaning
        for each in doomed.difference(signal_together([*doomed], signal.SIGKILL)):
            with suppress(OSError):  # of another user, whom this one may kill
                os.kill(each.pid, signal.SIGKILL)
        killed |= doomed
        time.sleep(_PAUSE)  # they may have forked meanwhile
    for group in groups:  # somebody starts others again and again
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    return dict.fromkeys(killed, True)


def members_of(groups: Collection[int], program: str = "") -> dict[Process, bool | None]:
    """The living processes in these groups, but for the leaders.

    For each, whether it is a resource tracker or another program that cleans up; None for one that computes.
    """
    if not any(map(_has_members, groups)):
        return {}
    wanted, places = set(map(str, groups)), [place for place in Path("/proc").iterdir() if place.name.isdigit()]
    inside = [place for place in places if place.name not in wanted and {*stat_of(place)[2:3]} & wanted]
    found = {Process.of(int(place.name)): _cleans_up(place, program) for place in inside}
    return {process: kind for process, kind in found.items() if process.ticks}


class LeftProcesses:
    """Programs that dead workers have left: each ends by itself within a moment, or is killed.

    Processes that compute, such as workers of a data loader, are killed at once: they hold ports, devices and memory.
    Resource trackers wait for that, and then remove segments that nobody has any more.

    Args:
        program: Command that the workers run, if it is one.
    """

    def __init__(self, program: object = "") -> None:
        self._program = Path(program).name if isinstance(program, str) else ""
        self._groups = frozenset[int]()
        self._processes: Mapping[Process, bool] = {}
        self._timer: Timer | None = None
        self._end = 0.0

    def leave(self, groups: Collection[int]) -> None:
        """Kill the rest of the groups of reaped workers; programs have a moment, concurrently with the next steps."""
        if self._groups == {*groups}:
            return  # the end of a job comes twice
        self.close(at_once=True)
        self._groups = frozenset(groups)
        # The kernel gives the number of a group that has members to no new process. A process of that number is
        # of another's group, or is the worker itself, which the kernel does not let die.
        stats = {leader: stat_of(Path(f"/proc/{leader}")) for leader in groups}
        own = str(os.getpid())
        if found := kill_members([each for each, stat in stats.items() if stat[1:2] in ([], [own])], self._program):
            self._processes, self._end = found, time.monotonic() + MOMENT
            self._timer = Timer(MOMENT, _kill, [self._groups])
            self._timer.daemon = True
            self._timer.start()

    def wait_before_start(self) -> None:
        """Return once killed processes and resource trackers have ended, or have had their time."""
        awaited = [process for process, is_awaited in self._processes.items() if is_awaited]
        _wait(awaited, time.monotonic() + START_MOMENT)

    def close(self, *, at_once: bool = False) -> None:
        """Return when all have ended, by the end of their moment, or ``at_once``."""
        if self._timer is not None:
            if not at_once:
                _wait(self._processes, self._end)
            self._timer.cancel()
            self._timer, self._processes = None, {}
            _kill(self._groups)


def _kill(groups: Collection[int]) -> None:
    for group in groups:
        if not Path(f"/proc/{group}").exists():  # else it is a process that was started since
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it still runs, as another user
    return True


def _cleans_up(place: Path, program: str) -> bool | None:
    try:
        if _TRACKER in (place / "cmdline").read_bytes():
            return True
        name = (place / "exe").readlink().name
        return None if name == program or _COMPUTES.fullmatch(name) else False
    except OSError:
        return None


def _wait(processes: Collection[Process], end: float) -> None:
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        time.sleep(_PAUSE)
