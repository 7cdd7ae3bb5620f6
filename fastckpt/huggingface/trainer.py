"""A Trainer that saves to memory as often as every step, and to storage in the background."""

import os
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint as newest_of_stock

from fastckpt._core.client.heartbeat import phase
from fastckpt._core.native.folder_checkpointer import FolderCheckpointer, RequiredFiles, SaveResult, StorageType
from fastckpt.errors import ConfigError
from fastckpt.huggingface.trainer_files import STATE
from fastckpt.huggingface.trainer_session import NEWEST, CheckpointOptions, TrainerSession

__all__ = [
    "CheckpointOptions",
    "FastCheckpointMixin",
    "FastCheckpointTrainer",
    "FlashCkptTrainer",
    "get_last_checkpoint",
]


class FastCheckpointMixin(Trainer):  # type: ignore[misc]
    """Makes a Trainer save to memory: ``class MyTrainer(FastCheckpointMixin, Trainer)``, in this order.

    It saves the same files as that Trainer, under the same names (docs/guides/huggingface.md).

    Args:
        save_memory_steps: Steps between saves to memory, in addition to ``save_steps`` and the like; 0: none.
        checkpoint_options: See `CheckpointOptions`.

    Attributes:
        loaded_step: Step from which ``train`` continued; -1 if none, or if another program saved it.
        loaded_from: Tier of the load; "" if none.
        last_save: Result of the last save; None before.
    """

    _session: TrainerSession | None = None
    loaded_step = -1
    loaded_from = ""
    last_save: SaveResult | None = None
    _epoch_ended = -1

    def __init__(
        self,
        *args: Any,
        save_memory_steps: int = 0,
        checkpoint_options: CheckpointOptions | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.save_memory_steps = save_memory_steps
        self.checkpoint_options: CheckpointOptions = checkpoint_options or {}

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer.train``; after it, every checkpoint for storage is durable.

        Args:
            resume_from_checkpoint: True: the newest checkpoint of ``output_dir`` in any tier, or a fresh start; or the
                directory of one.
            *args: As for ``Trainer.train``; so are ``**kwargs``.

        Raises:
            ConfigError: Unsupported arguments; names them.
            (NoLoadableCheckpoint, BadCheckpoint): As `DdpCheckpointer.load_checkpoint`.
        """
        if args or kwargs.get("trial") is not None:
            raise ConfigError(
                "hyperparameter_search trains in directories of its own: use transformers' Trainer for it"
            )
        if type(self.save_memory_steps) is not int or self.save_memory_steps < 0:
            raise ConfigError(f"save_memory_steps is {self.save_memory_steps!r}; give a whole number, 0 or more")
        self._session, self._epoch_ended = TrainerSession(self, self.checkpoint_options), -1
        try:
            path = self._session.find(resume_from_checkpoint)
            self.loaded_step, self.loaded_from = self._session.loaded_step, self._session.loaded_from
            return super().train(path, **kwargs)
        finally:  # another trainer may save there next
            self._close_session()

    def get_last_checkpoint(self) -> str | None:
        """Newest checkpoint for ``train``, or None; all ranks call it. During training: the newest durable one."""
        if self._session is not None:
            return self._session.durable()
        return get_last_checkpoint(self.args.output_dir)

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Wait until each save for storage is durable, for ``timeout`` seconds at most.

        Raises:
            (TimeoutError, PersistError): As `DdpCheckpointer.wait_latest_checkpoint`.
        """
        if self._session is not None:
            self._session.wait_latest_checkpoint(timeout)

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._session is not None:
            self._session.loaded()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        if self._session is not None:
            self._session.measured(self.state.global_step, metrics)
        return bool(super()._determine_best_metric(metrics, trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._session is None:
            super()._save_checkpoint(model, trial)
        else:
            # As Trainer does before each of its own saves: the count of operations is part of its state.
            self.store_flos()
            self.last_save = self._session.save(StorageType.DISK)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        session, step, every = self._session, self.state.global_step, self.save_memory_steps
        # After super(): a save to storage of the same step has been made by then, and memory holds it already.
        if session is None or not every or step % every or step == session.saved_step:
            return
        control = self.control
        ends = control.should_epoch_stop or control.should_training_stop or float(self.state.epoch or 0.5).is_integer()
        if ends and self._epoch_ended != step:
            self._epoch_ended = step  # it comes here again, when the epoch has been evaluated, as a resume would not
            return
        self.store_flos()
        self.last_save = session.save(StorageType.MEMORY)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._session is None or self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
            return
        # Trainer would train one step more whenever it is resumed at the end
        self._load_rng_state(kwargs["resume_from_checkpoint"])
        self.control.should_training_stop = True

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as ``Trainer.evaluate``, during which ranks do not count as hung (docs/operate/hangs.md)."""
        with phase("evaluation"):
            return dict(super().evaluate(*args, **kwargs))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._session is not None:
            if self._session.path is not None:  # all epochs had been trained
                self._load_rng_state(self._session.path)
            self._session.wait()
        return super()._finalize_training(*args, **kwargs)


class FastCheckpointTrainer(FastCheckpointMixin):
    """transformers' Trainer with `FastCheckpointMixin`."""


FlashCkptTrainer = FastCheckpointTrainer
"""The name that users of Flash Checkpoint know."""


def get_last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Newest checkpoint that all ranks can load, in memory or on storage; all ranks call it.

    Give it to ``train``. It may be in memory alone. Several ranks need a process group, which TrainingArguments makes.

    Args:
        output_dir: As of TrainingArguments.

    Returns:
        ``<output_dir>/checkpoint-<step>``; None if there is none.

    Raises:
        NoLoadableCheckpoint: As `DdpCheckpointer.load_checkpoint`.
    """
    with FolderCheckpointer(output_dir, RequiredFiles(STATE, STATE)) as one:
        found = one.find()
        if found is not None:
            found.close(loaded=False)
            NEWEST.add(path := os.path.join(output_dir, f"checkpoint-{found.step}"))  # noqa: PTH118
            return path
    return newest_of_stock(output_dir) if os.path.isdir(output_dir) else None  # noqa: PTH112
