"""The part of a snapshot that is copied in the background, by one thread, once its save has returned."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from fastckpt._core import metrics
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.snapshot.mutation_check import Digests, MutationCheck
from fastckpt._core.torch_private.tensors import is_in_backward
from fastckpt._core.transfer.device_copy import DeviceCopy
from fastckpt._core.transfer.host_copy import Backlog, Copy, leaves_none
from fastckpt.errors import OverlapError

logger = logging.getLogger("fastckpt")

GLANCE = 0.001
"""Seconds between two checks whether training has gone on."""
PATIENCE = 1.0
"""Seconds that a copy leaves all cores to training, if training does not wait for it before."""
SHORTEST = 0.02
"""Seconds between a save and the wait for it from which on they show how many cores training uses."""


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a snapshot.

    Attributes:
        skipped: Reason why it was not taken; empty if it was.
        trouble: Reason why persists fail at the moment; empty if they do not.
        pending: True if it is still being finished in the background.
    """

    skipped: str
    trouble: str
    pending: bool = False


@dataclass(frozen=True)
class DeferredCopies:
    """Copies that can wait until a save has returned.

    Attributes:
        host: From host memory, of tensors that nothing mutates until the next step of an optimizer.
        device: The same from device memory.
        to_stage: From device memory, of tensors that may change at once: staged there before the save returns.
    """

    host: Sequence[Copy] = ()
    device: Sequence[Copy] = ()
    to_stage: Sequence[Copy] = ()

    def __bool__(self) -> bool:
        return bool(self.host or self.device or self.to_stage)


class SpareCores:
    """An estimate whether training leaves a core for a copy, by its processor time between a save and the wait for it.

    The threads of an operation wait for the one whose core a copy has taken. So where training uses all cores, a copy
    that overlaps with it costs twice its time and more. There it is faster if training waits while all cores copy.

    Attributes:
        none: True if training was seen to use all cores. Not before it was measured.
    """

    def __init__(self) -> None:
        self.none = False
        self._cores = len(os.sched_getaffinity(0))
        self._since: tuple[float, float] | None = None

    def begin(self) -> None:
        """Measure from now on: a save is about to return."""
        self._since = time.perf_counter(), time.process_time()

    def end(self, copied: float) -> None:
        """Training is about to wait, or to step; ``copied`` seconds of the processor since `begin` were the copy's."""
        # Taken before it is judged: another thread may wait for the same copy.
        since, self._since = self._since, None
        if since is not None and (passed := time.perf_counter() - since[0]) >= SHORTEST:
            self.none = leaves_none(self._cores, passed, time.process_time() - since[1] - copied)


class BackgroundCopy:
    """The part of a snapshot that is copied once its save has returned.

    Attributes:
        needed: Set before training waits for it.
        waited: Set once training waits for it.
        torn: The path of a tensor that was written to while it was copied, so that the snapshot was discarded; empty
            as long as none is known.
    """

    def __init__(
        self,
        save: SaveId,
        mutations: MutationCheck,
        later: DeferredCopies,
        transfers: Sequence[DeviceCopy],
        *,
        check: bool,
        patience: float = 0.0,
    ) -> None:
        self.save = save
        self.backlog = Backlog(later.host, mutations.compare)
        self.needed = threading.Event()
        self.waited = threading.Event()
        self.torn = ""
        self._transfers = transfers
        # Devices copy by themselves, and take no core from training.
        self._patience = 0.0 if transfers else patience
        self._begun, self._seconds = 0.0, 0.0
        self._copied = threading.Event()
        self._mutations = mutations
        self._verdict: str | None = None
        self._judging = threading.Lock()
        # Only with the option ``check``: digests read everything once more before the save returns.
        self._digests = Digests([*later.host, *later.device]) if check else None
        # The constructor runs in the training thread; the background thread watches where it is in its program.
        self._trainer = threading.get_ident()

    @property
    def can_be_held(self) -> bool:
        """Return whether training need not wait for the end: device streams can be held instead."""
        # Digests are compared when training waits, so with them the optimizer must not step before the end.
        return bool(self._transfers) and self._digests is None

    @property
    def seconds(self) -> float:
        """Processor time of the copy so far; while it is under way, as if it had a core."""
        return self._seconds or (time.perf_counter() - self._begun if self._begun else 0.0)

    def hold(self) -> str:
        """Let training mutate the tensors, on devices once they were read; the path of one mutated before, or empty."""
        # The optimizer is about to step in this thread. Host copies must end before it writes; copies from devices
        # need not: the step's stream is made to wait for the event after the last read.
        self.needed.set()
        self.backlog.help()
        self._copied.wait()
        for transfer in self._transfers:
            transfer.hold()
        verdict = self._judge()
        self.waited.set()
        return verdict

    def do(self, finish: Callable[[], SaveOutcome]) -> SaveOutcome:
        """Copy, and ``finish`` if nothing was written to meanwhile; raises OverlapError if versions missed it."""
        # 1. leave the cores to training, if it needs them all   2. copy   3. wait until the operation that training is
        # in has raised the versions of its tensors   4. compare versions and samples with those at the save
        # 5. commit and notify (finish)
        step = self.save.step
        self.needed.wait(self._patience)
        self._begun, used = time.perf_counter(), time.thread_time()
        try:
            with metrics.phase("overlap.copy", step=step):
                self._copy()
        # torch raises a RuntimeError for a failed device: this save is lost, and training learns of the device itself.
        except (RuntimeError, MemoryError) as error:
            logger.warning("step %d was not saved: it could not be copied: %s", step, error)
            return SaveOutcome(f"it could not be copied: {error}", str(error))
        self._seconds = time.thread_time() - used
        with metrics.phase("overlap.compare", step=step):
            self._wait_between_operations()
            # Sources first, then the finished copies: a write that was undone meanwhile shows in the copies alone.
            self.torn = self._judge() or self._mutations.miscopied()
            if self.torn:
                return SaveOutcome(f"{self.torn} was written to while it was copied", "")
            if self._digests is not None:
                self._compare(self._digests)
        outcome = finish()
        if outcome.skipped:
            logger.warning("step %d was not saved: %s", step, outcome.skipped)
        return outcome

    def _copy(self) -> None:
        with ExitStack() as stack:
            # Whatever fails, `hold` must not wait for ever: it waits for `_copied`, then for each transfer.
            for transfer in self._transfers:
                stack.callback(transfer.close)
            # Callbacks run in reverse order: `_copied` first, then the transfers, as `hold` waits for them.
            stack.callback(self._copied.set)
            self.backlog.finish()
            self._copied.set()
            for transfer in self._transfers:
                transfer.begin()
            for transfer in self._transfers:
                transfer.finish(self.save.step)

    def _judge(self) -> str:
        """The path of a tensor written to before the copy was held, else empty; later writes do not count."""
        with self._judging:
            # The first of both threads decides: writes after `hold` has released training are allowed.
            if self._verdict is None:
                self._verdict = self._mutations.changed()
            return self._verdict

    def _wait_between_operations(self) -> None:
        """Return when the operation that the training thread was in at the call has ended.

        An operation writes to a tensor without the GIL, and raises its version afterwards. It has ended when the
        thread is at another place in the program. Autograd's engine writes to gradients alone.
        """
        if self._digests is not None:
            # With the check of all digests nothing is committed before the wait, so that every write until then counts.
            self.waited.wait()
        before = _position(self._trainer)
        # The frame is kept meanwhile: that of the next call of the same function could be made where it was.
        while before and _position(self._trainer) == before and not self.waited.wait(GLANCE):
            pass

    def _compare(self, digests: Digests) -> None:
        differing = digests.differing()
        if differing is not None:
            raise OverlapError(
                coded(
                    f"{self._mutations.path(differing)} changed between the save of step {self.save.step} and the wait "
                    "for its copy, and its version did not: it was written to by way of .data, numpy or another "
                    "process. That step was not saved. Write to it within torch.no_grad() instead, before the save or "
                    "after the next step of an optimizer, or save without overlap.",
                    "FC-008",
                )
            )


def _position(thread: int) -> tuple[FrameType, int] | None:
    """The place in the program that a thread is at; None in autograd's engine, or once it has ended."""
    # A private function of CPython, but the only view of another thread's frame that does not stop it.
    frame = sys._current_frames().get(thread)
    if frame is None or is_in_backward(frame):
        return None
    # f_lasti is the index of the last bytecode: unlike the line number it also changes within one line of a loop.
    return frame, frame.f_lasti
