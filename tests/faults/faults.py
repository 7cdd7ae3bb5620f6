"""Faults that read as sentences: ``kill(rank=1, at="snapshot.fill", step=20)``; each strikes once in a job."""

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt import metrics
from fastckpt.memory import fill

_CLOCK_MONOTONIC = 1


@dataclass(frozen=True)
class Fault:
    """SIGKILL of the worker ``rank`` when it, or the agent, enters the phase ``at`` at ``step``.

    With ``after``, as many seconds later, at whatever instant that is. With ``copied``, in the middle of a fill: when
    that many copies and half of the next one are done.
    """

    rank: int
    at: str
    step: int
    after: float = 0.0
    copied: int | None = None

    @property
    def by_agent(self) -> bool:
        return self.at.startswith(("persist.", "arena."))

    def __str__(self) -> str:
        parts = [f"rank={self.rank}", f'at="{self.at}"', f"step={self.step}"]
        parts += [f"after={self.after:.4f}"] if self.after else []
        parts += [f"copied={self.copied}"] if self.copied is not None else []
        return f"kill({', '.join(parts)})"


def kill(rank: int, at: str, step: int, after: float = 0.0, copied: int | None = None) -> Fault:
    return Fault(rank, at, step, after, copied)


def to_text(faults: list[Fault]) -> str:
    return "\n".join(map(str, faults))


def from_text(text: str) -> list[Fault]:
    return [eval(line, {"kill": kill}) for line in text.splitlines()]  # the test wrote it


def strike_in_worker(faults: list[Fault], rank: int, out: Path) -> None:
    """Let this process, a worker, die by those faults that are its own."""
    mine = [fault for fault in faults if fault.rank == rank and not fault.by_agent]

    def observe(phase: str, fields: dict[str, Any]) -> None:
        for fault in mine:
            if (fault.at, fault.step) == (phase, fields.get("step")) and _first_time(fault, out):
                _kill_this_process(fault)

    metrics.observe(observe)


def strike_from_agent(faults: list[Fault], out: Path) -> None:
    """Let this process, the agent, kill its workers by those faults that happen in its own phases."""
    mine = [fault for fault in faults if fault.by_agent]

    def observe(phase: str, fields: dict[str, Any]) -> None:
        for fault in mine:
            if (fault.at, fault.step) == (phase, fields.get("step")) and _first_time(fault, out):
                os.kill(int((out / f"pid.{fault.rank}").read_text()), signal.SIGKILL)

    metrics.observe(observe)


def _first_time(fault: Fault, out: Path) -> bool:
    try:
        (out / f"struck: {fault}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _kill_this_process(fault: Fault) -> None:
    if fault.copied is not None:
        _kill_within_a_copy(fault.copied)
    elif fault.after:
        _kill_after(fault.after)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def _kill_within_a_copy(whole: int) -> None:
    done = 0

    def copy(target: int, source: int, size: int) -> None:
        nonlocal done
        if done == whole:
            ctypes.memmove(target, source, size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        ctypes.memmove(target, source, size)
        done += 1

    fill._copy_holding_gil = fill._copy_without_gil = copy  # ty: ignore


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
