"""Saves to memory between those that ModelCheckpoint makes."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fastckpt.checkpointer import StorageType
from fastckpt.errors import ConfigError


class MemoryCheckpoint(Callback):
    """Saves to memory at the end of training steps; the trainer's plugin is a `FastCheckpointIO`.

    After the last step of an epoch it waits for the first of the next: Lightning would resume what was saved before
    without the hooks and the validation of the epoch's end.

    Args:
        every_n_train_steps: How many steps of optimizers lie between two saves, at least.

    Raises:
        ConfigError: That is no positive number.
    """

    def __init__(self, every_n_train_steps: int = 1) -> None:
        if every_n_train_steps < 1:
            raise ConfigError(f"every_n_train_steps is {every_n_train_steps}; give at least 1")
        self._every = every_n_train_steps
        self._saved = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here."""
        self._saved = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save, if it is time."""
        if trainer.global_step - self._saved >= self._every and not trainer.is_last_batch:
            self._saved = trainer.global_step
            trainer.save_checkpoint("", storage_options=StorageType.MEMORY)
