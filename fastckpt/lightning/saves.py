"""Saves of one Lightning run: a step may be saved more than once, each time with its state by then."""

import logging
import random
from typing import Any

import numpy as np
import torch

from fastckpt._core.replicas.replica_faults import Lacking
from fastckpt._core.session import SaveResult, StorageType
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import PersistError
from fastckpt.lightning._private import progress

logger = logging.getLogger("fastckpt")

KEPT_FOR = "lightning"
"""Detail of a checkpoint: the purpose of its save."""
IN_MEMORY = "memory"
"""A save that Lightning did not ask for: not needed once something newer is durable."""


class Saves(DdpCheckpointer):
    """A `DdpCheckpointer` that saves a step as often as Lightning does."""

    _lacking: Lacking = "unlike"
    saved_step = -1
    _begun = -1
    """The step of the last save, also if this rank skipped it: all ranks must open a history, or none."""
    _progress: dict[str, Any] | None = None

    def save(self, step: int, state: dict[str, Any], path: str, storage_type: StorageType) -> SaveResult:
        """Save a checkpoint of Lightning, to memory or to the file at ``path`` as well; all ranks call it.

        A step is saved again with the results of validation, or the end of its epoch, that its checkpoint has by now.
        """
        # 1. the same history on all nodes   2. another one, if this step was saved before   3. save, and remember the
        # progress of the save
        writer, kept_for = self._writer, {KEPT_FOR: IN_MEMORY if storage_type is StorageType.MEMORY else "file"}
        if not writer.history.loads:
            writer.open_history(writer.ranks, "")  # the same on all nodes
        if step == self._begun:
            writer.begin_history()  # all ranks save it again
        self._begun = step
        states = self._compared(step, state, {}, storage_type)
        result = writer.save(step, states, storage_type, path, None, kept_for)
        if result:
            self.saved_step, self._progress = step, progress(state)
        return result

    def has_saved(self, checkpoint: dict[str, Any]) -> bool:
        """Return whether the newest save was made at the same place of the same loops."""
        return checkpoint["global_step"] == self.saved_step and progress(checkpoint) == self._progress

    def settle_storage(self) -> bool:
        """Wait until nothing is on its way to storage; whether all that was asked for came there."""
        try:
            self.wait_latest_checkpoint()
        except (PersistError, TimeoutError) as error:
            logger.error("not all checkpoints are durable: %s", error)
            return False
        return True

    @property
    def is_busy(self) -> bool:
        """True if anything may still be on its way to storage."""
        status = self._writer.glance()
        return status is None or status.waiting > 0

    def load(self, path: str) -> dict[str, Any]:
        """The newest state, or the one at ``path``; empty if nothing was ever saved. All ranks call it."""
        state = self.load_checkpoint(path)
        self.saved_step = self._begun = -1
        if "generators" in self.rank_state:  # of an earlier version
            _restore(self.rank_state["generators"])
        return state

    def overlap_with(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Copy tensors that these change in the background, from the next save on."""
        self._writer.overlap_with(optimizers)


def _restore(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
