"""Faults that read as sentences: ``kill(rank=1, at="snapshot.fill", step=20)``; a job injects each once, in turn."""

import contextlib
import ctypes
import errno
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
_AGENT_PHASES = ("persist.", "arena.", "launch.")


class InjectedError(RuntimeError):
    """Raised by a rank that fails so."""


@dataclass(frozen=True)
class Fault:
    """A deed, done when a rank, or the agent, enters the phase ``at`` at ``step`` or later.

    A phase that belongs to no step, such as resume.load, is entered at any.

    Attributes:
        deed: Name of a function of this module.
        options: Arguments of it, beside this fault and the folder of the job.
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
        globals()[self.deed](self, out, **self.options)


def kill(rank: int, at: str, step: int = 0, copied: int | None = None) -> Fault:
    """SIGKILL of a rank: at once, or amid a fill, after so many copies and half of one."""
    return Fault("kill_processes", at, step, rank, {"victims": "worker", "copied": copied})


def _kill(victims: str) -> Callable[..., Fault]:
    """SIGKILL of several, when the rank that is named comes to the phase, or the agent."""
    return lambda at, step=0, seen_by=0: Fault("kill_processes", at, step, seen_by, {"victims": victims})


kill_both, kill_agent, kill_all = _kill("both workers"), _kill("agent"), _kill("agent and workers")


def outlive(rank: int, at: str, step: int) -> Fault:
    """A rank comes to no end of a fill, whose bytes change for as long as it lives; its agent's end does not end it."""
    return Fault("write_without_end", at, step, rank)


def stop(rank: int, at: str, step: int = 0, seconds: float = 0.0) -> Fault:
    """SIGSTOP of a rank; it is continued after so many seconds, if there are any."""
    return Fault("stop_process", at, step, rank, {"seconds": seconds})


def fail(rank: int, at: str, step: int = 0) -> Fault:
    """An exception in a rank."""
    return Fault("raise_error", at, step, rank)


def leave(rank: int, at: str, step: int = 0, code: int = 3, at_once: bool = False) -> Fault:
    """sys.exit or, ``at_once``, os._exit of a rank."""
    return Fault("exit_process", at, step, rank, {"code": code, "at_once": at_once})


def hang(rank: int, at: str, step: int, function: str) -> Fault:
    """A rank hangs in the function of this name."""
    return Fault(function, at, step, rank)


def cut(part: float, at: str, step: int = 0, rank: int = 0) -> Fault:
    """All images that this host holds are cut to a part of their length, while processes have them mapped."""
    return Fault("cut_images", at, step, rank, {"part": part})


def starve(victim: str, at: str, step: int = 0, rank: int = 0) -> Fault:
    """All that the job's cgroup may have is taken: the kernel kills "itself", "agent" or "template"."""
    return Fault("starve_group", at, step, rank, {"victim": victim})


def delay(seconds: float, at: str, step: int = 0, rank: int = 0) -> Fault:
    """The phase begins so many seconds late."""
    return Fault("sleep_first", at, step, rank, {"seconds": seconds})


def refuse(call: str, error: str, at: str, step: int = 0) -> Fault:
    """One call of a function of os on the checkpoint directory fails in the agent, with an error of errno."""
    return Fault("refuse_a_call", at, step, 0, {"call": call, "error": error})


# --- what they do


def kill_processes(fault: Fault, out: Path, victims: str, copied: int | None = None) -> None:
    if copied is not None:
        _kill_within_a_copy(copied)
        return
    agent = os.getpid() if fault.by_agent else os.getppid()
    ranks = f"pid.{fault.rank}" if victims == "worker" else "pid.*"
    workers = [int(path.read_text()) for path in out.glob(ranks) if victims != "agent"]
    pids = [pid for pid in workers if _is_child(pid, agent)]
    pids += [agent] if victims.startswith("agent") else []
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):  # itself last
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not fault.by_agent:
        time.sleep(60)  # it goes no further, though it may be its parent's end that kills it


def stop_process(fault: Fault, out: Path, seconds: float) -> None:
    if seconds:
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error(fault: Fault, out: Path) -> None:
    raise InjectedError(f"{fault.at} of step {fault.step}")


def exit_process(fault: Fault, out: Path, code: int, at_once: bool) -> None:
    (os._exit if at_once else sys.exit)(code)


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


def loop_in_c_with_the_gil(fault: Fault, out: Path) -> None:
    re.compile("(a+)+$").match("a" * 60 + "b")


def cut_images(fault: Fault, out: Path, part: float) -> None:
    for path in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*/*.pt"):
        os.truncate(path, int(part * path.stat().st_size))


def starve_group(fault: Fault, out: Path, victim: str) -> None:
    agent = os.getpid() if fault.by_agent else os.getppid()
    workers = {int(path.read_text()) for path in out.glob("pid.*")}
    others = {child.pid for child in psutil.Process(agent).children()} - workers
    (pid,) = {"itself": {os.getpid()}, "agent": {agent}, "template": others}[victim]
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    taken = []
    while _lives(pid):
        taken.append(bytearray(os.urandom(1 << 12) * (1 << 10)))


def sleep_first(fault: Fault, out: Path, seconds: float) -> None:
    time.sleep(seconds)


def refuse_a_call(fault: Fault, out: Path, call: str, error: str) -> None:
    real, number, left = getattr(os, call), getattr(errno, error), True

    def refuse(target: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        within = target if isinstance(target, int) else kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
        path = "" if within is None else os.readlink(f"/proc/self/fd/{within}")
        path = path if isinstance(target, int) else os.path.join(path, os.fspath(target))
        if left and "/checkpoints" in path:
            left = False
            raise OSError(number, os.strerror(number), path)
        return real(target, *args, **kwargs)

    setattr(os, call, refuse)


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


def write_without_end(fault: Fault, out: Path) -> None:
    def copy(target: int, _: int, size: int) -> None:
        while True:
            ctypes.memmove(target, os.urandom(size), size)
            time.sleep(0.0005)

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    _copy_by(copy)


def _copy_by(copy: Callable[[int, int, int], None]) -> None:
    host_copy._copy_holding_gil = host_copy.copy_without_gil = copy  # ty: ignore
