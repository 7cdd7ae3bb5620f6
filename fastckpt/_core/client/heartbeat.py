"""Progress of a worker, its steps and phases, written to the telemetry block as they happen."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastckpt._core.client.arrival_hooks import ArrivalHooks, models_in_memory
from fastckpt._core.memory.step_clock import AWAY, STEPS, StepClock, running
from fastckpt._core.memory.telemetry import Line
from fastckpt._core.metrics import observe, unobserve
from fastckpt._core.policy.hangs import EXIT
from fastckpt._core.torch_private.tensors import collective_timeout, makes_optimizer_states, untraced
from fastckpt.errors import ConfigError


@dataclass(eq=False)
class _Mark:
    """A phase that the script has marked, with its limit in nanoseconds, 0 if the script gives none."""

    name: str
    allowed: int


_LONGEST = 1e9
_OVERRUN = 600.0
"""Seconds by which a phase may overrun its own timeout before that is a hang."""
_PATIENCE_KEPT = 1.0
"""Seconds for which the limits of process groups are not read again."""
_marks: list[_Mark] = []
_ended = [0.0, 0.0]
"""Seconds that marked phases took, and of the processor."""
_open: "list[Heartbeat]" = []
_LOOKS = (1, STEPS, STEPS**2, STEPS**3)
"""Steps after which models are looked for, until there are some."""


@contextmanager
def phase(name: str, timeout: float = 0.0) -> Iterator[None]:
    """Mark a part of a script without steps, such as an evaluation, for the detection of hangs.

    All ranks should enter it, also those that only wait.

    Args:
        name: Name in logs and events, of which 40 bytes count.
        timeout: Seconds until it counts as a hang; 0: unknown; inf: never. Default of an inner phase: that of the
            outer.

    Raises:
        ConfigError: No name, or an invalid ``timeout``.
    """
    if not (timeout >= 0 and name.strip("\0 ")):
        raise ConfigError(f"phase({name!r}, timeout={timeout}): give a name, and seconds, 0 or more")
    around = _marks[-1].allowed if _marks else 0
    mark = _Mark(name, _nanoseconds(timeout) or around)
    start, used = time.monotonic(), time.process_time()
    _marks.append(mark)
    _show_marks()
    try:
        yield
    finally:
        _marks.remove(mark)
        _show_marks()
        if not _marks:
            _ended[:] = _ended[0] + time.monotonic() - start, _ended[1] + time.process_time() - used


def marked() -> tuple[float, float]:
    """Seconds that this process has spent in marked phases, those that have ended, and of the processor."""
    seconds, processor = _ended
    return seconds, processor


def _nanoseconds(seconds: float) -> int:
    return int(min(seconds, _LONGEST) * 1e9)


@cache
def _report_exit() -> None:
    """Report the end of this process as a phase when it begins: it may take longer than a step."""
    with suppress(RuntimeError):  # it ends already
        threading._register_atexit(_exit)  # type: ignore[attr-defined]  # not atexit: that waits for threads first


def _exit() -> None:
    _marks.append(_Mark(EXIT, 0))
    _show_marks()


def _show_marks() -> None:
    for beats in _open:
        beats.show_mark()
    if clock := running.clock:
        clock.pause() if _marks else clock.go_on()


def _only_makes_states() -> bool:
    """Return whether the optimizer step that runs only makes states, to load into or to save: torch makes them so.

    `torch.distributed.checkpoint.state_dict` makes it, before the first one of training, and it changes no parameter.
    """
    frame = sys._getframe().f_back
    while frame is not None and not makes_optimizer_states(frame):
        frame = frame.f_back
    return frame is not None


class Heartbeat:
    """Reports on ``line`` the progress of this process, until `close`.

    Steps are those that the script names to `reach`, if it has a checkpointer for that; else those of its optimizers,
    by ``clock`` if there is one. A process may have neither: other libraries' optimizers may not be torch's. Then it
    reports a step after each save of a newer step than all saves before, and than the load. ``stacks`` is from
    `memory.stacks`. With ``parts``, the first one of a process also reports the parts of steps, from the second step
    on.

    Attributes:
        stalled: Seconds that training has spent in saves and in waiting for them.
        clock: Counts the steps of the training, where several steps of optimizers make one; None if each counts.
        optimizers: Optimizers that have made a step.
        by_script: True if the script names each step, so that those of optimizers do not count.
    """

    def __init__(self, line: Line, generation: int, stacks: int, *, parts: bool = False) -> None:
        self._line = line
        self._pid = os.getpid()
        self._has_optimizer = self._works = self.by_script = False
        self._newest = 0
        self.stalled = self._patience_due = 0.0
        self.clock: Callable[[], int] | None = None
        self._counted = -1
        self._steps = 0
        self._arrivals = ArrivalHooks()
        line.begin(generation, self._pid, stacks)
        self._clock = StepClock(line) if parts and running.clock is None else None
        running.clock = self._clock or running.clock
        _open.append(self)
        self.show_mark()
        _report_exit()
        observe(self._see)
        self.optimizers = WeakSet[Optimizer]()
        self._hook = register_optimizer_step_post_hook(self._stepped)

    @contextmanager
    def work(self, name: str, timeout: float | None = None) -> Iterator[None]:
        """Report that a phase of ours lasts (`metrics.phase` names its parts); one with a timeout ends by itself."""
        self._works = True
        self._tell_patience()
        self._line.enter(name, 0 if timeout is None else _nanoseconds(max(0.0, timeout) + _OVERRUN))
        clock = running.clock
        part = clock.enter(AWAY) if clock else AWAY
        try:
            yield
        finally:
            self._works = False
            self.show_mark()
            if clock:
                clock.enter(part)

    @contextmanager
    def save(self, step: int) -> Iterator[None]:
        """Report that a save lasts; training stalls meanwhile."""
        with self.stall("save"):
            yield
        if not (self.by_script or self._has_optimizer) and step > self._newest:
            self._line.step()
        self._line.at(step)
        self._newest = max(step, self._newest)

    @contextmanager
    def stall(self, name: str, timeout: float | None = None) -> Iterator[None]:
        """Report a phase, as `work`; training waits for its end."""
        start = time.monotonic_ns()
        with self.work(name, timeout):
            try:
                yield
            finally:
                nanoseconds = time.monotonic_ns() - start
                self.stalled += nanoseconds / 1e9
                self._line.stall(nanoseconds)

    def resume(self, step: int) -> None:
        """Report the step that was loaded."""
        self._newest = max(step, 0)
        self._line.resume(step)

    def reach(self, step: int) -> None:
        """Report that the script, which names each step, has completed this one; one that is named again is none."""
        if step != self._newest:
            self._newest = step
            self._step()
            self._line.at(step)

    def show_mark(self) -> None:
        """Report the phase of the script, by its own marks."""
        if os.getpid() == self._pid:
            mark = _marks[-1] if _marks else _Mark("", 0)
            self._line.enter(mark.name, mark.allowed)

    def close(self) -> None:
        """Deregister."""
        self._hook.remove()
        self._arrivals.close()
        if self._clock is not None and running.clock is self._clock:
            running.clock = None
        unobserve(self._see)
        _open.remove(self)
        self._line.leave()

    def _tell_patience(self) -> None:
        """Report how long process groups let ranks wait; scripts add groups, and change their limits."""
        if (now := time.monotonic()) >= self._patience_due:
            self._patience_due = now + _PATIENCE_KEPT
            self._line.wait_at_most(_nanoseconds(collective_timeout()))

    @untraced
    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # in a child that was forked meanwhile
            return
        self.optimizers.add(optimizer)
        if self.by_script:
            self._line.beat()
            return
        self._has_optimizer = True
        if self._counted < 0 and _only_makes_states():
            return
        now = self.clock() if self.clock else self._counted + 1
        if now != self._counted:
            self._counted = now
            self._step()

    def _step(self) -> None:
        """Report that a step is complete."""
        self._line.step()
        if (clock := running.clock) is not None and clock is self._clock:
            clock.step()
            self._steps += 1
            if self._steps in _LOOKS and not self._arrivals:
                self._arrivals.install(models_in_memory())

    def _see(self, phase: str, fields: dict[str, Any]) -> None:
        # Other checkpointers have phases, too, and the saver, when it is in this process.
        if self._works and phase.startswith(("snapshot.", "resume.")) and os.getpid() == self._pid:
            self._line.enter(phase)
