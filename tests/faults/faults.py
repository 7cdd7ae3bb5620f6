"""Faults that read as sentences: ``kill(rank=1, at="snapshot.fill", step=20)``; a job injects each once, in turn."""

import contextlib
import ctypes
import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fastckpt._core import metrics
from fastckpt._core.memory import slots
from fastckpt._core.transfer import host_copy

_CLOCK_MONOTONIC = 1
_AGENT_PHASES = ("persist.", "arena.", "launch.")


@dataclass(frozen=True)
class Fault:
    """What happens when a rank, or the agent, enters the phase ``at`` at ``step`` or later.

    A phase that belongs to no step, such as resume.load, is entered at any.
    """

    at: str
    step: int

    @property
    def by_agent(self) -> bool:
        return self.at.startswith(_AGENT_PHASES)

    def is_due(self, phase: str, fields: dict[str, Any]) -> bool:
        return self.at == phase and fields.get("step", self.step) >= self.step

    def inject(self, out: Path) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL of the victims, which ``rank`` sees enter the phase, unless it is one of the agent's.

    With ``after``, as many seconds later, at whatever instant that is. With ``copied``, in the middle of a fill: when
    that many copies and half of the next one are done.
    """

    rank: int
    victims: str = "worker"
    after: float = 0.0
    copied: int | None = None

    def inject(self, out: Path) -> None:
        if self.copied is not None:
            _kill_within_a_copy(self.copied)
        elif self.after:
            _kill_after(self.after)
        else:
            self._kill(out, os.getpid() if self.by_agent else os.getppid())

    def _kill(self, out: Path, agent: int) -> None:
        ranks = f"pid.{self.rank}" if self.victims == "worker" else "pid.*"
        workers = [int(path.read_text()) for path in out.glob(ranks) if self.victims != "agent"]
        pids = [pid for pid in workers if _is_child(pid, agent)]
        pids += [agent] if self.victims.startswith("agent") else []
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):  # itself last
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self.by_agent:
            time.sleep(60)  # it goes no further, though it may be its parent's end that kills it


@dataclass(frozen=True)
class Stop(Fault):
    """SIGSTOP of the worker ``rank``."""

    rank: int

    def inject(self, out: Path) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Hang(Fault):
    """The worker ``rank`` hangs in the function of this name."""

    rank: int
    function: str

    def inject(self, out: Path) -> None:
        globals()[self.function]()


def take_a_lock_that_another_thread_holds() -> None:
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


def loop_in_c_with_the_gil() -> None:
    re.compile("(a+)+$").match("a" * 60 + "b")


@dataclass(frozen=True)
class Harm(Fault):
    """Images of this name that the node of ``rank`` holds of a step, or of any, are removed, or changed in one bit."""

    rank: int
    name: str
    saved: int
    is_removed: bool

    def inject(self, out: Path) -> None:
        for slot in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*"):
            save, path = slots.read(slot).committed, slot / self.name
            if save is None or self.saved not in (0, save.step):
                continue
            if self.is_removed:
                path.unlink()
                continue
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 4]))


@dataclass(frozen=True)
class Cut(Fault):
    """All images that this host holds are cut to a part of their length, while processes have them mapped."""

    part: float
    rank: int = 0

    def inject(self, out: Path) -> None:
        for slot in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*"):
            for path in slot.glob("*.pt"):
                os.truncate(path, int(self.part * path.stat().st_size))


@dataclass(frozen=True)
class Fill(Fault):
    """Somebody takes all that is left of shared memory, for so many seconds."""

    seconds: float
    rank: int = 0

    def inject(self, out: Path) -> None:
        ballast = Path(os.environ["FASTCKPT_SHM_DIR"], f"ballast-{time.monotonic_ns()}")
        file = ballast.open("wb", buffering=0)
        ballast.unlink()  # it is gone with this process at the latest, as with one that was killed
        for size in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
        threading.Timer(self.seconds, file.close).start()


@dataclass(frozen=True)
class Starve(Fault):
    """This process takes all that the job's cgroup may have: the kernel kills it, or its agent, or the template."""

    victim: str
    rank: int = 0

    def inject(self, out: Path) -> None:
        agent = os.getpid() if self.by_agent else os.getppid()
        workers = {int(path.read_text()) for path in out.glob("pid.*")}
        others = {child.pid for child in psutil.Process(agent).children()} - workers
        (pid,) = {"itself": {os.getpid()}, "agent": {agent}, "template": others}[self.victim]
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        taken = []
        while _lives(pid):
            taken.append(bytearray(os.urandom(1 << 12) * (1 << 10)))


@dataclass(frozen=True)
class Delay(Fault):
    """The phase begins so many seconds late."""

    seconds: float
    rank: int = 0

    def inject(self, out: Path) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Refusal(Fault):
    """From here on so many calls of a function of os on the checkpoint directory fail in the agent."""

    call: str
    error: str
    times: int = 1

    def inject(self, out: Path) -> None:
        real, number, left = getattr(os, self.call), getattr(errno, self.error), self.times

        def refuse(target: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            within = target if isinstance(target, int) else kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
            path = "" if within is None else os.readlink(f"/proc/self/fd/{within}")
            path = path if isinstance(target, int) else os.path.join(path, os.fspath(target))
            if left and "/checkpoints" in path:
                left -= 1
                raise OSError(number, os.strerror(number), path)
            return real(target, *args, **kwargs)

        setattr(os, self.call, refuse)


def kill(rank: int, at: str, step: int = 0, after: float = 0.0, copied: int | None = None) -> Fault:
    return Kill(at, step, rank, "worker", after, copied)


def kill_both(at: str, step: int = 0, seen_by: int = 0) -> Fault:
    return Kill(at, step, seen_by, "both workers")


def kill_agent(at: str, step: int = 0, seen_by: int = 0) -> Fault:
    return Kill(at, step, seen_by, "agent")


def kill_all(at: str, step: int = 0, seen_by: int = 0) -> Fault:
    return Kill(at, step, seen_by, "agent and workers")


def stop(rank: int, at: str, step: int = 0) -> Fault:
    return Stop(at, step, rank)


def hang(rank: int, at: str, step: int, function: str) -> Fault:
    return Hang(at, step, rank, function)


def remove(name: str, rank: int, at: str, saved: int = 0) -> Fault:
    return Harm(at, 0, rank, name, saved, True)


def flip(name: str, rank: int, at: str, saved: int = 0) -> Fault:
    return Harm(at, 0, rank, name, saved, False)


def cut(part: float, at: str, step: int = 0, rank: int = 0) -> Fault:
    return Cut(at, step, part, rank)


def fill(seconds: float, at: str, step: int = 0, rank: int = 0) -> Fault:
    return Fill(at, step, seconds, rank)


def starve(victim: str, at: str, step: int = 0, rank: int = 0) -> Fault:
    """``victim`` is "itself", "agent" or "template"."""
    return Starve(at, step, victim, rank)


def delay(seconds: float, at: str, step: int = 0) -> Fault:
    return Delay(at, step, seconds)


def refuse(call: str, error: str, at: str, step: int = 0, times: int = 1) -> Fault:
    """``refuse("fsync", "EIO", at="persist.manifest")``: the call is a function of os, the error one of errno."""
    return Refusal(at, step, call, error, times)


def to_text(faults: list[Fault]) -> str:
    return "\n".join(map(repr, faults))


def from_text(text: str) -> list[Fault]:
    names = {
        "Kill": Kill,
        "Stop": Stop,
        "Hang": Hang,
        "Harm": Harm,
        "Starve": Starve,
        "Cut": Cut,
        "Fill": Fill,
        "Delay": Delay,
        "Refusal": Refusal,
    }
    return [eval(line, names) for line in text.splitlines()]  # the test wrote it


def inject_requested_faults(rank: int, out: Path) -> None:
    """Inject the faults of this launch, if any, that happen in this process, a worker."""
    told = out / "faults"
    inject_in_worker(from_text(told.read_text()) if told.exists() else [], rank, out)


def inject_in_worker(faults: list[Fault], rank: int, out: Path) -> None:
    """Inject the faults that happen in phases of this process, a worker."""
    _inject(faults, out, lambda fault: not fault.by_agent and getattr(fault, "rank", 0) == rank)


def inject_in_agent(faults: list[Fault], out: Path) -> None:
    """Inject the faults that happen in phases of this process, the agent."""
    _inject(faults, out, lambda fault: fault.by_agent)


def _inject(faults: list[Fault], out: Path, is_mine: Any) -> None:
    mine = [(turn, fault) for turn, fault in enumerate(faults) if is_mine(fault)]

    def observe(phase: str, fields: dict[str, Any]) -> None:
        for turn, fault in mine:
            if fault.is_due(phase, fields) and _is_its_turn(turn, fault, out):
                fault.inject(out)

    if mine:
        metrics.observe(observe)


def _is_its_turn(turn: int, fault: Fault, out: Path) -> bool:
    if turn != len(list(out.glob("injected.*"))):
        return False
    with contextlib.suppress(FileExistsError), (out / f"injected.{turn}").open("x") as file:
        file.write(str(fault))
        return True
    return False  # in another thread


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

    host_copy._copy_holding_gil = host_copy.copy_without_gil = copy  # ty: ignore


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_", ctypes.c_char * 48),
    )


class _TimerSpec(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


def _kill_after(seconds: float) -> None:
    """Have the kernel kill this process, whatever it does then and whoever holds the GIL."""
    libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    event = _SigEvent(signal=signal.SIGKILL)
    spec = _TimerSpec(0, 0, int(seconds), max(1, int(seconds % 1 * 1e9)))
    if libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    if libc.timer_settime(timer, 0, ctypes.byref(spec), None):
        raise OSError(ctypes.get_errno(), "timer_settime")
