"""Faults that read as sentences: ``kill(rank=1, at="snapshot.fill", step=20)``; a job injects each once, in turn."""

import contextlib
import ctypes
import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fastckpt._core import metrics
from fastckpt._core.transfer import host_copy

_PR_SET_PDEATHSIG = 1
_LONGEST_LIFE = 120.0
"""Seconds after which an orphan ends that its test has not ended."""
_AGENT_PHASES = ("persist.", "arena.", "launch.")


class InjectedError(RuntimeError):
    """Raised by a rank that fails so."""


@dataclass(frozen=True)
class Fault:
    """A deed, done when a rank, or the agent, enters the phase ``at`` at ``step`` or later.

    A phase that belongs to no step, such as resume.load, is entered at any.

    Attributes:
        deed: Name of a function of this module.
        options: Arguments of it, besides this fault and the folder of the job.
    """

    deed: str
    at: str
    step: int = 0
    rank: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def by_agent(self) -> bool:
        return self.at.startswith(_AGENT_PHASES)

    def is_due(self, phase: str, fields: dict[str, Any]) -> bool:
        return self.at == phase and fields.get("step", self.step) >= self.step

    def inject(self, out: Path) -> None:
        _DEEDS[self.deed](self, out, **self.options)


_DEEDS: dict[str, Callable[..., None]] = {}


def deed(act: Callable[..., None]) -> Callable[..., Fault]:
    """Have a call of this name make the fault, whose options this function takes when it happens."""
    _DEEDS[act.__name__] = act

    @functools.wraps(act)
    def make(rank: int = 0, at: str = "", step: int = 0, **options: Any) -> Fault:
        return Fault(act.__name__, at, step, rank, options)

    return make


def hang(rank: int, at: str, step: int, function: str) -> Fault:
    """A rank hangs in the function of this name."""
    return Fault(function, at, step, rank)


# --- what they do: of several processes, when the rank that is named comes to the phase, or the agent


@deed
def kill(fault: Fault, out: Path, copied: int | None = None) -> None:
    """SIGKILL of a rank: at once, or amid a fill, after so many copies and half of one."""
    if copied is None:
        _kill(fault, out, f"pid.{fault.rank}")
    else:
        _kill_within_a_copy(copied)


@deed
def kill_both(fault: Fault, out: Path) -> None:
    _kill(fault, out, "pid.*")


@deed
def kill_agent(fault: Fault, out: Path) -> None:
    _kill(fault, out, "", agent_too=True)


@deed
def kill_all(fault: Fault, out: Path) -> None:
    _kill(fault, out, "pid.*", agent_too=True)


def _kill(fault: Fault, out: Path, ranks: str, *, agent_too: bool = False) -> None:
    agent = os.getpid() if fault.by_agent else os.getppid()
    workers = [int(path.read_text()) for path in (out.glob(ranks) if ranks else ())]
    pids = [*(pid for pid in workers if _is_child(pid, agent)), *[agent] * agent_too]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):  # itself last
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not fault.by_agent:
        time.sleep(60)  # it goes no further, though it may be its parent's end that kills it


@deed
def stop(fault: Fault, out: Path, seconds: float = 0.0) -> None:
    """SIGSTOP of a rank; it is continued after so many seconds, if there are any."""
    if seconds:
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


@deed
def fail(fault: Fault, out: Path) -> None:
    raise InjectedError(f"{fault.at} of step {fault.step}")


@deed
def leave(fault: Fault, out: Path, code: int = 3, at_once: bool = False) -> None:
    (os._exit if at_once else sys.exit)(code)


@deed
def take_a_lock_that_another_thread_holds(fault: Fault, out: Path) -> None:
    lock = threading.Lock()

    def hold() -> None:
        with lock:
            threading.Event().wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    while not lock.locked():
        time.sleep(0.001)
    with lock:
        raise AssertionError("two threads have one lock")


@deed
def loop_in_c_with_the_gil(fault: Fault, out: Path) -> None:
    re.compile("(a+)+$").match("a" * 60 + "b")


@deed
def cut(fault: Fault, out: Path, part: float) -> None:
    """All images that this host holds are cut to a part of their length, while processes have them mapped."""
    for path in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*/*.pt"):
        os.truncate(path, int(part * path.stat().st_size))


@deed
def starve(fault: Fault, out: Path, victim: str) -> None:
    """All that the job's cgroup may have is taken: the kernel kills "itself", "agent" or "template"."""
    agent = os.getpid() if fault.by_agent else os.getppid()
    workers = {int(path.read_text()) for path in out.glob("pid.*")}
    others = {child.pid for child in psutil.Process(agent).children()} - workers
    (pid,) = {"itself": {os.getpid()}, "agent": {agent}, "template": others}[victim]
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    taken = []
    while _lives(pid):
        taken.append(bytearray(os.urandom(1 << 12) * (1 << 10)))


@deed
def delay(fault: Fault, out: Path, seconds: float) -> None:
    time.sleep(seconds)


@deed
def refuse(fault: Fault, out: Path, call: str, error: str) -> None:
    """One call of a function of os on the checkpoint directory fails in the agent, with an error of errno."""
    real, number, left = getattr(os, call), getattr(errno, error), True

    def refused(target: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        within = target if isinstance(target, int) else kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
        path = "" if within is None else os.readlink(f"/proc/self/fd/{within}")
        path = path if isinstance(target, int) else os.path.join(path, os.fspath(target))
        if left and "/checkpoints" in path:
            left = False
            raise OSError(number, os.strerror(number), path)
        return real(target, *args, **kwargs)

    setattr(os, call, refused)


@deed
def outlive(fault: Fault, out: Path) -> None:
    """A rank comes to no end of a fill, whose bytes change for as long as it lives; its agent's end does not end it."""

    def copy(target: int, _: int, size: int) -> None:
        end = time.monotonic() + _LONGEST_LIFE
        while time.monotonic() < end:
            ctypes.memmove(target, os.urandom(size), size)
            time.sleep(0.0005)
        os._exit(1)

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    _copy_by(copy)


# --- when they do it


def to_text(faults: list[Fault]) -> str:
    return "\n".join(json.dumps(asdict(fault)) for fault in faults)


def inject_requested_faults(rank: int, out: Path) -> None:
    """Inject the faults of this launch, if any, that happen in phases of this process, a worker."""
    _inject(out, lambda fault: not fault.by_agent and fault.rank == rank)


def inject_in_agent(out: Path) -> None:
    """Inject the faults that happen in phases of this process, the agent."""
    _inject(out, lambda fault: fault.by_agent)


def _inject(out: Path, is_mine: Callable[[Fault], bool]) -> None:
    told = out / "faults"
    lines = told.read_text().splitlines() if told.exists() else []
    faults = [Fault(**json.loads(line)) for line in lines]
    mine = [(turn, fault) for turn, fault in enumerate(faults) if is_mine(fault)]

    def observe(phase: str, fields: dict[str, Any]) -> None:
        for turn, fault in mine:
            if fault.is_due(phase, fields) and _is_its_turn(turn, out):
                fault.inject(out)

    if mine:
        metrics.observe(observe)


def _is_its_turn(turn: int, out: Path) -> bool:
    """Whether nobody, in another thread either, has injected it, and all before it were."""
    if turn != len(list(out.glob("injected.*"))):
        return False
    with contextlib.suppress(FileExistsError):
        (out / f"injected.{turn}").touch(exist_ok=False)
        return True
    return False


def _is_child(pid: int, parent: int) -> bool:
    try:
        return bool(psutil.Process(pid).ppid() == parent)
    except psutil.Error:
        return False


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _kill_within_a_copy(whole: int) -> None:
    done = 0

    def copy(target: int, source: int, size: int) -> None:
        nonlocal done
        if done == whole:
            ctypes.memmove(target, source, size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        ctypes.memmove(target, source, size)
        done += 1

    _copy_by(copy)


def _copy_by(copy: Callable[[int, int, int], None]) -> None:
    host_copy._copy_holding_gil = host_copy.copy_without_gil = copy  # ty: ignore
