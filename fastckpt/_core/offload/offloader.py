"""The offloading of one training run: its forwards one after another, the profile of each, and the account."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch.autograd.graph import saved_tensors_hooks

from fastckpt._core import metrics
from fastckpt._core.client.worker_reports import before_the_end
from fastckpt._core.offload.activation_store import ActivationStore
from fastckpt._core.offload.forward_hooks import ForwardHooks, Identities
from fastckpt._core.offload.forward_pass import ForwardPass
from fastckpt._core.offload.known_steps import KnownStep, KnownSteps
from fastckpt._core.offload.offload_log import OffloadLog
from fastckpt._core.offload.offload_report import OffloadReport, outcomes
from fastckpt._core.offload.scratch_file import ScratchFile
from fastckpt._core.policy.offload_budget import least_budget
from fastckpt._core.policy.offload_plan import plan
from fastckpt._core.torch_private.tensors import untraced

logger = logging.getLogger("fastckpt")

FIRST_BUDGET = 1 << 30
"""Bytes of the budget "auto" until a step was profiled."""
UNMEASURED = 1e9
"""Bytes per second of a disk to which nothing was written yet."""


class Offloader:
    """Offloads tensors that the forwards of a training run save.

    Args:
        directory: An existing directory.
        budget: Bytes that may stay in memory; None: the fewest with which transfers hide behind the computation.
        copies: True if tensors are copied when they are saved.
        half: True if floats of 32 bits are stored in 16.
        unmap: True if the C library shall give freed memory back to the system.
    """

    def __init__(self, directory: Path, budget: int | None, *, copies: bool, half: bool, unmap: bool) -> None:
        self._auto = budget is None
        file = ScratchFile(directory)
        if file.in_memory:
            logger.warning(
                "%s is in memory (a tmpfs): to offload activations to it frees none; choose an SSD", directory
            )
        self._log = OffloadLog(str(directory))
        self._store = ActivationStore(file, budget or FIRST_BUDGET, half=half, on_end=self._log.ended)
        self._identities = Identities()
        self._known = KnownSteps()
        self._passes: list[ForwardPass] = []
        # Reports are asked for in any thread, also while another one trains.
        self._learning = threading.RLock()
        self._copies = copies
        self._unmap = unmap
        self._count = 0
        self._half = half
        self._left = self._kept = 0
        self._waited = [0.0, 0.0]
        self._outcomes = outcomes(None, 0.0, 0)
        before_the_end(self._conclude)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Offload the tensors that autograd saves in this block."""
        # 1. learn from the passes that have ended   2. save by the plan of the known step that this one is
        # 3. if it is one, its backward is expected to be as before
        with self._learning:
            self._learn()
        self._store.memory.peak = self._store.resident
        self._store.transfers.give_back_memory()
        match, forward = self._known.match(), ForwardPass()
        hooks = ForwardHooks(self._store, self._identities, forward, match, copies=self._copies, unmap=self._unmap)
        self._passes.append(forward)
        self._count += 1
        # Compiled code calls them as they are. Partial objects, since methods take no attributes.
        pack, unpack = untraced(partial(hooks.pack)), untraced(partial(hooks.unpack))
        try:
            with metrics.phase("offload.forward", step=self._count), saved_tensors_hooks(pack, unpack):
                yield
        finally:
            forward.end_forward()
        if known := self._known.find(forward):
            forward.order = known.order
        self._left = hooks.left

    def report(self) -> OffloadReport:
        """Return the report of offloading so far."""
        with self._learning:
            self._learn(at_once=True)
            return self._account()

    def _account(self) -> OffloadReport:
        store, (wait, wrote) = self._store, self._outcomes
        return OffloadReport(
            directory=str(store.file.directory),
            budget=store.memory.budget,
            half=self._half,
            forwards=self._count,
            written=store.transfers.written.bytes,
            read=store.transfers.read.bytes,
            kept=self._kept,
            left=self._left,
            peak=store.memory.peak,
            waited_for_writes=self._waited[0] + sum(each.pack_wait for each in self._passes),
            waited_for_reads=self._waited[1] + sum(each.fetch_wait for each in self._passes),
            wait=wait,
            wrote=wrote,
            write_rate=store.transfers.written.rate,
            read_rate=store.transfers.read.rate,
            direct=store.file.direct,
            gpu_way=store.transfers.gpudirect.way,
            failure=store.failure,
        )

    def _learn(self, *, at_once: bool = False) -> None:
        """Compare passes whose backward is over with their plans, or make a plan for their like.

        The host is ahead of a GPU, and without a plan waits for it. Else only ``at_once``: how it went is of no hurry.
        """
        for forward in [each for each in self._passes if each.is_over]:
            known = self._known.find(forward)
            if known and not at_once and forward.times is not None and not forward.times.are_known:
                continue
            self._passes.remove(forward)
            self._waited[0] += forward.pack_wait
            self._waited[1] += forward.fetch_wait
            if not forward.was_needed:
                continue
            self._kept = sum(each.size for each in forward.entries) - forward.moved
            made = known.plan if known else None
            self._outcomes = outcomes(made, forward.wait, forward.written)
            if made and not self._store.failure:
                self._log.came(made, forward)
            self._known.learn(known or self._planned(forward))
        self._log.measured(self._account, self._store.failure)

    def _conclude(self) -> None:
        """Report the result so far to the agent, if there is one."""
        with self._learning:
            if self._count:
                self._learn(at_once=True)
                self._log.conclude(self._account, self._store.failure)

    def _planned(self, forward: ForwardPass) -> KnownStep:
        with metrics.phase("offload.plan"):
            write_rate = self._store.transfers.written.rate or UNMEASURED
            profile = forward.profile(write_rate, self._store.transfers.read.rate or write_rate)
            if self._auto:
                least = least_budget(profile)
                self._store.memory.budget = least if self._known.is_empty else max(least, self._store.memory.budget)
            made = plan(profile, self._store.memory.budget)
        sizes = tuple(each.size for each in forward.entries)
        self._log.planned(made, sizes, self._store.memory.budget)
        return KnownStep(sizes, forward.order_of_needs(), made)
