"""Finishes snapshots behind training, and waits for them before an optimizer changes what is copied."""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fastckpt import metrics
from fastckpt.engine.outcome import Outcome
from fastckpt.engine.still import Digests, Still
from fastckpt.errors import ConfigError, OverlapError
from fastckpt.format.ids import SaveId
from fastckpt.format.plan import Plan
from fastckpt.memory.fill import Backlog, Copy

logger = logging.getLogger("fastckpt")

GLANCE = 0.001
"""Seconds between two looks at whether training has gone on."""


class _Rest:
    """What is left of a snapshot once its save has returned.

    Attributes:
        waited: Set once training waits for it.
    """

    def __init__(self, save: SaveId, still: Still, copies: Sequence[Copy], *, check: bool) -> None:
        self.save = save
        self.backlog = Backlog(copies)
        self.waited = threading.Event()
        self._still = still
        self._digests = Digests(copies) if check else None
        self._trainer = threading.get_ident()

    def do(self, finish: Callable[[], Outcome]) -> Outcome:
        """Copy, and ``finish`` if nothing was written to meanwhile; raises OverlapError if that was not to be seen."""
        step = self.save.step
        with metrics.phase("overlap.copy", step=step):
            self.backlog.finish()
        with metrics.phase("overlap.compare", step=step):
            self._wait_between_operations()
            if path := self._still.changed():
                return Outcome(f"{path} was written to while it was copied", "")
            if self._digests is not None:
                self._compare(self._digests)
        outcome = finish()
        if outcome.skipped:
            logger.warning("step %d was not saved: %s", step, outcome.skipped)
        return outcome

    def _wait_between_operations(self) -> None:
        """Return when what the training thread was writing as this was called, it has written.

        An operation raises the version of a tensor after it has written to it, without the GIL. It is over when the
        thread has come to another place in the program. Autograd's engine writes to gradients alone.
        """
        if self._digests is not None:
            self.waited.wait()
        before = _position(self._trainer)
        while before and _position(self._trainer) == before and not self.waited.wait(GLANCE):
            pass

    def _compare(self, digests: Digests) -> None:
        differing = digests.differing()
        if differing is not None:
            raise OverlapError(
                f"{self._still.path(differing)} changed between the save of step {self.save.step} and the wait for its "
                "copy, and its version did not: it was written to by way of .data, numpy or another process. That step "
                "was not saved. Write to it within torch.no_grad() instead, before the save or after the next step of "
                "an optimizer, or save without overlap."
            )


class Overlap:
    """Snapshots of which a part, that stands still until the next step of an optimizer, is copied by a thread.

    After Mohan, Phanishayee, Chidambaram, "CheckFreq" (FAST'21), section 4.3.1, where the weight update waits for the
    snapshot. Here a snapshot also counts only if nothing was written to what the thread has copied. The first one is
    copied at once, and watched: a model that writes to its weights in each forward is known by then.

    Args:
        optimizers: Whose parameters and ``state`` stand still between steps; without any, nothing is deferred.
        stall: Says that training waits, as `engine.beats.Beats.stall`.
        check: Digest what is deferred before and after, and commit at the next wait only.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], stall: Callable[[str], AbstractContextManager[None]], *, check: bool
    ) -> None:
        self._optimizers = optimizers
        self._stall = stall
        self._check = check
        self._is_proven = check
        self._pid = os.getpid()
        self._waits = threading.RLock()
        self._pending: tuple[_Rest, Future[Outcome]] | None = None
        self._watched: tuple[SaveId, Still] | None = None
        self._endings: list[tuple[SaveId, Outcome]] = []
        self._pool = ThreadPoolExecutor(1, "fastckpt-overlap")
        self._hook: RemovableHandle | None = None
        if optimizers:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            # Not atexit: that comes when thread pools take no more work. Of these the last comes first: before the
            # saver of this process ends.
            threading._register_atexit(_wait_at_exit, weakref.ref(self))  # type: ignore[attr-defined]

    def part(self, plans: Iterable[Plan], copies: Sequence[Copy]) -> tuple[Still | None, Sequence[Copy], list[Copy]]:
        """What stands still, if that is of interest; the copies to do at once; and those that can wait."""
        if not self._optimizers:
            return None, copies, []
        still = Still(plans, self._optimizers)
        return (still, *still.part(copies)) if self._is_proven else (still, copies, [])

    def watch(self, save: SaveId, still: Still) -> None:
        """See by the next step whether what stands still did so."""
        self._watched = save, still

    def begin(self, save: SaveId, still: Still, copies: Sequence[Copy], finish: Callable[[], Outcome]) -> None:
        """Do the copies behind training's back; then ``finish``, if nothing was written to them meanwhile."""
        rest = _Rest(save, still, copies, check=self._check)
        self._pending = rest, self._pool.submit(rest.do, finish)
        self.watch(save, still)

    @property
    def pending(self) -> bool:
        """Whether something is being copied."""
        return self._pending is not None

    def wait(self) -> None:
        """Return when nothing is being copied, at once if nothing is; raises OverlapError if it must not go on."""
        if os.getpid() != self._pid:
            return
        if self._pending is not None:
            with self._waits:
                self._end()
        watched, self._watched = self._watched, None
        if watched is not None and (path := watched[1].changed()):
            self._give_up(watched[0], path)

    def endings(self) -> list[tuple[SaveId, Outcome]]:
        """What became of snapshots that were finished since the last call, oldest first."""
        endings, self._endings = self._endings, []
        return endings

    def close(self) -> None:
        """Wait, and defer no more; raises what `wait` does."""
        try:
            self.wait()
        finally:
            self._optimizers = ()
            if self._hook is not None:
                self._hook.remove()
            self._pool.shutdown()

    def _end(self) -> None:
        if (pending := self._pending) is None:
            return  # another thread has waited
        rest, outcome = pending
        with self._stall("overlap.wait"), metrics.phase("overlap.wait", step=rest.save.step):
            rest.backlog.help()
            rest.waited.set()
            wait([outcome])
        if self._pending is pending:  # else a handler of signals has waited
            self._pending = None
            error = outcome.exception()
            self._endings.append((rest.save, Outcome(str(error), "") if error else outcome.result()))
            if error:
                raise error

    def _give_up(self, save: SaveId, path: str) -> None:
        self._optimizers = ()
        lost = any(ended == save and outcome.skipped for ended, outcome in self._endings)
        logger.warning(
            "%s was written to between the save of step %d and the next step of an optimizer%s. Saves do not overlap "
            "with training any more: from now on each copies all before it returns.",
            path, save.step, ", and so this step was not saved" if lost else "",
        )  # fmt: skip

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        if self._watched is not None and os.getpid() == self._pid:
            self.wait()
            self._is_proven = True

    # As torch.compiler.disable would, without importing the compiler: a compiled optimizer calls it as it is.
    _before_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def optimizers_in(overlap: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    """The optimizers that a user gives; raises ConfigError for what is none."""
    given = (overlap,) if isinstance(overlap, Optimizer) else () if overlap is None else tuple(overlap)
    for each in given:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"overlap has a {type(each).__name__}; give torch optimizers, whose steps can be seen")
    return given


def _position(thread: int) -> tuple[int, int] | None:
    """Where in the program a thread is; None in autograd's engine, or once it has ended."""
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code is _engine_run_backward.__code__:
        return None
    return id(frame), frame.f_lasti


def _wait_at_exit(reference: "weakref.ref[Overlap]") -> None:
    overlap = reference()
    if overlap is not None:
        try:
            overlap.wait()
        except OverlapError as error:
            logger.error("%s", error)
