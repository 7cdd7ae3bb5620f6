"""Saves to memory between those that ModelCheckpoint makes."""

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fastckpt._core.session import StorageType
from fastckpt.errors import ConfigError
from fastckpt.lightning._private import has_stepped, is_validated_next

logger = logging.getLogger("fastckpt")


class MemoryCheckpoint(Callback):
    """Saves to memory at the end of training steps; the trainer's plugin is a `FastCheckpointIO`.

    A step before a validation within the epoch is saved after it. Instead of an epoch's last step the first of the next
    is saved, so that a resume skips no hooks.

    Args:
        every_n_train_steps: Optimizer steps between saves, at least.

    Raises:
        ConfigError: ``every_n_train_steps`` is not positive.
    """

    def __init__(self, every_n_train_steps: int = 1) -> None:
        if every_n_train_steps < 1:
            raise ConfigError(f"every_n_train_steps is {every_n_train_steps}; give at least 1")
        self._every = every_n_train_steps
        self._saved = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here."""
        self._saved = trainer.global_step
        if trainer.num_training_batches == 1:
            logger.warning("MemoryCheckpoint saves nothing: each epoch has 1 batch, and the last one is not saved")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save, if it is time and no validation follows."""
        if not is_validated_next(trainer):
            self._save(trainer)

    def after_validation(self, trainer: Trainer) -> None:
        """Save, if it is time: a strategy of ours calls it, once all callbacks have seen the results of validation."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        # A distance, not a multiple: steps that cannot be saved are made up for at the next one that can.
        is_due = trainer.global_step - self._saved >= self._every
        if is_due and has_stepped(trainer) and not trainer.is_last_batch:
            self._saved = trainer.global_step
            trainer.save_checkpoint("", weights_only=False, storage_options=StorageType.MEMORY)
