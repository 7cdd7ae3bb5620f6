"""Finishes snapshots in the background, and waits for them before an optimizer changes the tensors."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fastckpt._core import metrics
from fastckpt._core.arguments import shown
from fastckpt._core.client.optimizers import unwrapped
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.plan import Plan
from fastckpt._core.snapshot.background_copy import (
    PATIENCE,
    BackgroundCopy,
    DeferredCopies,
    SaveOutcome,
    SpareCores,
)
from fastckpt._core.snapshot.mutation_check import MutationCheck
from fastckpt._core.torch_private.tensors import share_memory_lock, share_memory_map, storage_key, untraced
from fastckpt._core.transfer.device_copy import records_graph
from fastckpt._core.transfer.device_streams import DeviceStreams, by_place
from fastckpt._core.transfer.host_copy import Copy
from fastckpt.errors import ConfigError, OverlapError

logger = logging.getLogger("fastckpt")


class Overlap:
    """Snapshots; a thread copies their tensors that nothing mutates until the next step of an optimizer.

    After Mohan, Phanishayee, Chidambaram, "CheckFreq" (FAST'21), section 4.3.1, where the weight update waits for the
    snapshot. Here a snapshot also counts only if nothing was written to the tensors that the thread copies. The first
    one is copied at once, and watched: so a model that writes to its weights in each forward is detected.

    Args:
        optimizers: Only their steps mutate their parameters and ``state``; without any, nothing is deferred.
        streams: Copy from the memory of devices.
        stall: Reports that training waits, as `Heartbeat.stall`.
        check: Digest the deferred tensors before and after, and commit at the next wait only.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        streams: DeviceStreams,
        stall: Callable[[str], AbstractContextManager[None]],
        *,
        check: bool,
    ) -> None:
        self._optimizers: Sequence[Optimizer] = ()
        self._derived: Callable[[], Iterable[torch.Tensor]] = tuple
        self._streams = streams
        self._stall = stall
        self._check = check
        # With digests every write is detected, so not even the first snapshot needs to be copied at once.
        self._is_proven = check
        self._cores = SpareCores()
        self._pid = os.getpid()
        self._waits = threading.RLock()
        self._pending: tuple[BackgroundCopy, Future[SaveOutcome]] | None = None
        self._watched: tuple[SaveId, MutationCheck] | None = None
        self._barrier = ShareMemoryGuard((), self.wait)
        self._endings: list[tuple[SaveId, SaveOutcome]] = []
        self._pool = ThreadPoolExecutor(1, "fastckpt-overlap")
        self._hook: RemovableHandle | None = None
        self.defer(optimizers)

    def defer(self, optimizers: Sequence[Optimizer], derived: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """Copy tensors that these change in the background, from the next snapshot on; they replace those before.

        Args:
            derived: Returns tensors that change only after such a step begins, as `MutationCheck` takes them.
        """
        self._optimizers, self._derived = optimizers, derived
        if optimizers and self._hook is None:
            # The global hook of all optimizers: any of them may write to a tensor that another one's snapshot copies.
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            # Not atexit: that runs when thread pools take no more work. Callbacks of threading run in reverse order,
            # so this one runs before the saver of this process ends.
            threading._register_atexit(_wait_at_exit, weakref.ref(self))  # type: ignore[attr-defined]

    def part(
        self, plans: Collection[Plan], copies: Sequence[Copy]
    ) -> tuple[MutationCheck | None, Sequence[Copy], DeferredCopies]:
        """The mutation check, if any; the copies to do at once; and those that can wait."""
        # 1. divide the copies by whether only an optimizer's step changes their storages   2. sample those on the host
        # now, while they are surely unchanged   3. defer nothing in the first snapshot, which is only watched
        if not self._optimizers:
            return None, copies, DeferredCopies()
        mutations = MutationCheck(plans, self._optimizers, self._derived())
        now, later = mutations.part(copies)
        on_host = not any(plan.device for plan in plans)
        # The common case first: without tensors on a device the copies need not be divided again.
        host, device = (later, []) if on_host else by_place(later)
        if not self._check:
            mutations.sample(host)
        if not self._is_proven:
            return mutations, copies, DeferredCopies()
        now, to_stage = (now, []) if on_host else by_place(now)
        return mutations, now, DeferredCopies(host, device, to_stage)

    def watch(self, save: SaveId, mutations: MutationCheck) -> None:
        """Check at the next step that nothing was mutated."""
        self._watched = save, mutations
        self._cores.begin()

    def begin(
        self, save: SaveId, mutations: MutationCheck, later: DeferredCopies, finish: Callable[[], SaveOutcome]
    ) -> None:
        """Copy in the background; then ``finish``, if nothing was written to the tensors meanwhile."""
        # The guard goes up before the thread starts: moving a storage to shared memory frees the thread's source.
        sample = (lambda _: ()) if self._check else mutations.sample_device
        transfers = self._streams.begin(later.device, later.to_stage, sample)
        patience = PATIENCE if self._cores.none else 0.0
        copying = BackgroundCopy(save, mutations, later, transfers, check=self._check, patience=patience)
        self._barrier = ShareMemoryGuard(mutations.in_memory(), self.wait)
        self._pending = copying, self._pool.submit(copying.do, finish)
        self.watch(save, mutations)

    @property
    def pending(self) -> bool:
        """Return whether a copy is under way."""
        return self._pending is not None and not self._pending[1].done()

    def wait(self) -> None:
        """Return when nothing is being copied, at once if nothing is; raises OverlapError if it must not go on."""
        if os.getpid() != self._pid:
            return  # a forked child has the attributes, but not the thread
        self._measure()
        if self._pending is not None:
            with self._waits:  # reentrant: a signal handler may save while this thread waits
                self._end()
        # Taken before it is judged: a second wait must not judge writes that the optimizer's step makes after this one.
        watched, self._watched = self._watched, None
        if watched is not None and (path := watched[1].changed()):
            # The copy may have ended before the write: then that save counts, and only overlap is turned off.
            lost = any(ended == watched[0] and outcome.skipped for ended, outcome in self._endings)
            self._give_up(watched[0], path, lost=lost)

    def endings(self) -> list[tuple[SaveId, SaveOutcome]]:
        """Outcomes of the snapshots that were finished since the last call, oldest first."""
        endings, self._endings = self._endings, []
        return endings

    def close(self) -> None:
        """Wait, and defer no more; raises the errors of `wait`."""
        try:
            self.wait()
        finally:
            self._optimizers = ()
            if self._hook is not None:
                self._hook.remove()
            self._pool.shutdown()

    def _measure(self) -> None:
        """Note how many cores training has left, before it waits."""
        pending = self._pending
        self._cores.end(pending[0].seconds if pending else 0.0)

    def _end(self) -> None:
        if (pending := self._pending) is None:
            return  # another thread has waited
        copying, outcome = pending
        with self._stall("overlap.wait"), metrics.phase("overlap.wait", step=copying.save.step):
            copying.needed.set()
            copying.backlog.help()
            copying.waited.set()
            # Not outcome.result(): a signal handler that saves during this wait ends the same pending copy.
            wait([outcome])
        if self._pending is pending:  # else a signal handler has waited during the wait above
            self._pending = None
            self._barrier.lift()
            error = outcome.exception()
            self._endings.append((copying.save, SaveOutcome(str(error), "") if error else outcome.result()))
            if error:
                raise error
            if copying.torn:
                self._give_up(copying.save, copying.torn, lost=True)

    def _give_up(self, save: SaveId, path: str, *, lost: bool) -> None:
        if not self._optimizers:
            return
        self._optimizers = ()
        logger.warning(
            coded(
                "%s was written to between the save of step %d and the next step of an optimizer%s. Saves do not "
                "overlap with training any more: from now on each copies all before it returns.",
                "FC-008",
            ),
            path,
            save.step,
            ", and so this step was not saved" if lost else "",
        )

    @untraced
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        # This runs in torch's pre-hook of every optimizer's step, before it writes to anything.
        if self._optimizers and records_graph():
            self.wait()  # replays of the graph run no hooks
            self._optimizers = ()
            logger.warning("a step is captured into a CUDA graph: saves do not overlap with training")
        if os.getpid() != self._pid:
            return
        # Streams that step are noted even without a pending copy: the next
        # `begin` must know whether staging is ordered before all of them.
        self._streams.trains()
        if self._watched is not None:
            self._hold()
            self._is_proven = True
        elif (pending := self._pending) is not None:
            pending[0].hold()  # this step may be in another stream than the first

    def _hold(self) -> None:
        """Return when a step may write to the tensors being copied: on devices, once they were read."""
        pending, watched = self._pending, self._watched
        self._measure()
        # On the host memcpy must have ended before the step writes; only device streams can order it without the host.
        if pending is None or watched is None or not pending[0].can_be_held:
            self.wait()
            return
        copying = pending[0]
        with self._waits, self._stall("overlap.wait"), metrics.phase("overlap.wait", step=copying.save.step):
            lost = copying.hold()
        self._watched = None
        if path := lost or watched[1].changed():
            self._give_up(watched[0], path, lost=bool(lost))


class ShareMemoryGuard:
    """A lock that ``share_memory_`` and queues of torch.multiprocessing take before they move one of these storages.

    Both free the memory where a storage was. While one thread shares a storage, torch has others wait for a lock in a
    map; this object is put there as such a lock.

    Args:
        storages: They are not moved until `lift`.
        wait: Returns when they may be moved.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage], wait: Callable[[], None]) -> None:
        self._keys = [*map(storage_key, storages)]
        self._wait = wait
        with share_memory_lock:
            for key in self._keys:
                # setdefault: another thread may be sharing the same
                # storage now, whose lock must stay where torch put it.
                share_memory_map.setdefault(key, self)  # type: ignore[arg-type]

    def __enter__(self) -> None:
        self._wait()

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is nothing to release."""

    def lift(self) -> None:
        """Let them be moved at once."""
        with share_memory_lock:
            for key in self._keys:
                # torch removes its own locks from this map; the one there by now may be another thread's.
                if share_memory_map.get(key) is self:  # type: ignore[comparison-overlap]
                    del share_memory_map[key]


def optimizers_in(overlap: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    """The optimizers that a user gives; raises ConfigError for any other object."""
    given = tuple(overlap) if isinstance(overlap, Iterable) else () if overlap is None else (overlap,)
    for each in given:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"overlap is {shown(each)}; it takes torch optimizers, whose steps can be seen: give overlap=optimizer"
            )
    return tuple(map(unwrapped, given))


def _wait_at_exit(reference: "weakref.ref[Overlap]") -> None:
    overlap = reference()
    if overlap is not None:
        try:
            overlap.wait()
        except OverlapError as error:
            logger.error("%s", error)
        overlap._optimizers = ()  # later saves, by atexit or a thread that still runs, are copied at once
