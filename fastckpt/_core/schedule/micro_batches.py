"""Finds the steps of a loop that end with an update of the weights, where each micro-batch is a step."""

from collections.abc import Sequence
from typing import Any

import torch

from fastckpt._core.data.protocol import DataState, data_state
from fastckpt._core.schedule.profiler import Due
from fastckpt._core.torch_private.tensors import untraced


class MicroBatches:
    """Finds whole steps, after which step number, position in the data and generators belong to the weights.

    The loader's ``accumulate`` is the number of batches of an update. This class detects where an update was made,
    because a loop may make another at the end of an epoch, or none. Where GradScaler skips one, its micro-batches are
    used up all the same. Without ``accumulate``, and where gradients are saved, each step is whole.

    Args:
        optimizers: A step of any of them is an update.
        data: The loader of the batches; from now on its state counts each of them.
        saved: True if gradients are part of the state.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], data: Any, *, saved: bool) -> None:
        self._data = data
        self._most = 1 if saved else getattr(data, "accumulate", 1)
        self._since, self._updated = 0, False
        self._whole: tuple[int, DataState] | None = None
        self._owed, self._epoch = Due(False, False), dict[str, float]()
        if hasattr(data, "accumulate"):
            # From now on this class, not the loader, decides which batches belong to the weights.
            data.accumulate = 1
        for optimizer in optimizers if self._most > 1 else ():
            optimizer.register_step_post_hook(self._updates)

    def begin(self, step: int) -> None:
        """Note that training goes on after this step, which was whole: nothing is due."""
        self._owed, self._epoch = Due(False, False), {}
        self._whole_is(step)

    def turn(self, step: int) -> None:
        """Note that a step of the loop has ended."""
        self._since += 1
        if self._updated or self._since >= self._most:
            self._whole_is(step)

    def due(self, due: Due, epoch: dict[str, float]) -> tuple[Due, dict[str, float]]:
        """The saves due at the end of the loop's last step, and the epoch that has ended; nothing, unless it was whole.

        A save that is not made then waits for the next whole step.
        """
        owed = Due(self._owed.snapshot or due.snapshot, self._owed.persist or due.persist), self._epoch | epoch
        nothing = Due(False, False), dict[str, float]()
        now, (self._owed, self._epoch) = (nothing, owed) if self._since else (owed, nothing)
        return now

    @property
    def whole(self) -> tuple[int, DataState] | None:
        """The last whole step, and where the data were then; None if it was the last step of the loop."""
        # Between two updates the weights are those of the last one, so step, data and generators must be, too.
        return self._whole if self._since else None

    def _whole_is(self, step: int) -> None:
        self._since, self._updated = 0, False
        if self._most > 1:
            self._whole = step, data_state(self._data)

    @untraced
    def _updates(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._updated = True
