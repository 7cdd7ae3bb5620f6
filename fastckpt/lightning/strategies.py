"""Strategies of Lightning in which all ranks save and load: its own call the CheckpointIO on the first rank alone."""

import logging
import os
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from fastckpt._core.client.optimizers import refuse_sharded
from fastckpt._core.snapshot.rng_state import restore_rng, rng_state
from fastckpt.errors import ConfigError
from fastckpt.lightning._private import is_in_batch_hooks, is_validated_next
from fastckpt.lightning.callback import MemoryCheckpoint
from fastckpt.lightning.checkpoint_io import NEWEST, FastCheckpointIO, StorageType

logger = logging.getLogger("fastckpt")


class AllRanks(Strategy):
    """Differences of our strategies from those of Lightning that they derive from."""

    _has_warned = False
    _generators: dict[str, Any] | None = None
    """States at the time of the checkpoint that was loaded; None when training has continued."""

    @property
    def _io(self) -> FastCheckpointIO:
        io = self.checkpoint_io
        if not isinstance(io, FastCheckpointIO):
            raise ConfigError(
                f"{type(self).__name__} saves with a FastCheckpointIO, not with {type(io).__name__}: give the trainer "
                "plugins=[FastCheckpointIO(checkpoint_dir)]"
            )
        io.for_all_ranks = True
        return io

    def setup_environment(self) -> None:
        """Same as Lightning's; raises ConfigError without `FastCheckpointIO`, or if Lightning starts processes."""
        environment = getattr(self, "cluster_environment", None)
        count = int(getattr(self, "num_processes", 1))
        if count > 1 and isinstance(environment, LightningEnvironment):
            raise ConfigError(
                f"Lightning has started the {count} processes itself, so nobody keeps the memory of one that dies: "
                "start the script with fastckpt-run --nproc_per_node"
            )
        super().setup_environment()
        self._io.has_ended = False

    def setup(self, trainer: Trainer) -> None:
        """Same as Lightning's."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_sharded(self.optimizers)
            swaps = any(isinstance(each, WeightAveraging) for each in trainer.callbacks)  # type: ignore[attr-defined]
            if swaps and self._io.overlap:
                logger.warning("WeightAveraging writes to weights that saves may be copying: saves do not overlap")
            self._io.overlap_with([] if swaps else self.optimizers)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save on all ranks; the first one's path counts."""
        if storage_options is not StorageType.MEMORY:
            # ModelCheckpoint forms names from metrics, which may differ between ranks.
            filepath = self.broadcast(os.fspath(filepath))
            self._warn_of_lost_hooks(checkpoint["global_step"])
        self._io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Go on training from a checkpoint, or read one."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            return self._io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        path = os.fspath(checkpoint_path)
        state = self._io.resume("" if path == NEWEST else path)
        # Kept, because Lightning draws numbers between the load and the first batch.
        self._generators = rng_state() if state else None
        return state

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint."""
        self._io.remove_checkpoint(filepath)

    def process_dataloader(self, dataloader: object) -> object:
        """Next, an iterator is made: it draws random numbers."""
        if self._generators is not None and self._trainer.training:
            restore_rng(self._generators)
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Next, a batch is fetched, unless the epoch had ended: then Lightning makes another iterator first."""
        super().on_train_start()
        fit = self._trainer.fit_loop
        was_last_of_epoch = fit.restarted_mid_epoch and fit.epoch_loop.batch_progress.is_last_batch
        if self._generators is not None and not was_last_of_epoch:
            restore_rng(self._generators)
        self._generators = None

    def on_validation_end(self) -> None:
        """All callbacks have been called: validation's changes in them are saved with the step before it."""
        super().on_validation_end()
        if self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking:
            for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, MemoryCheckpoint):
                    callback.after_validation(self._trainer)

    def _warn_of_lost_hooks(self, step: int) -> None:
        trainer = self._trainer
        if self._has_warned or trainer.state.fn != TrainerFn.FITTING or not is_in_batch_hooks(trainer):
            return
        if trainer.is_last_batch or is_validated_next(trainer):
            self._has_warned = True
            logger.warning(
                "ModelCheckpoint saves step %d before its validation or its epoch's end: Lightning goes on from that "
                "file without the validation and the hooks that follow. Choose steps that end no epoch and are not "
                "validated, or leave every_n_train_steps out",
                step,
            )

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


class FastDDPStrategy(AllRanks, DDPStrategy):
    """Lightning's DDPStrategy, with the same arguments, for a trainer with a `FastCheckpointIO`.

    Its set-up raises ConfigError without that plugin, or if Lightning starts processes itself.
    """


class FastSingleDeviceStrategy(AllRanks, SingleDeviceStrategy):
    """Lightning's SingleDeviceStrategy, with the same arguments, for a trainer with a `FastCheckpointIO`."""
