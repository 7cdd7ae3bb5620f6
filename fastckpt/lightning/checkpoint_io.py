"""Lightning's plugin for checkpoint files: they are saved to memory, and persisted to the path that Lightning names."""

import logging
import os
import sys
from functools import partial
from typing import Any

import torch
from lightning import __version__
from lightning.fabric.plugins.io import TorchCheckpointIO

from fastckpt._core.config import RankInfo
from fastckpt._core.retention import CheckpointDeletionStrategy
from fastckpt._core.session import StorageType
from fastckpt._core.storage.store import normalised
from fastckpt.errors import ConfigError
from fastckpt.lightning.checkpoint_removal import Removal
from fastckpt.lightning.saves import Saves

__all__ = ["NEWEST", "FastCheckpointIO", "StorageType"]

logger = logging.getLogger("fastckpt")

NEWEST = "newest"
"""``trainer.fit(model, ckpt_path=NEWEST)`` resumes the newest checkpoint, in memory or on storage, if any."""


class Nothing(dict[str, Any]):
    """The checkpoint of a job that was never saved: Lightning asks for its version, then takes it for none."""

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": __version__})

    def __bool__(self) -> bool:
        return False


class FastCheckpointIO(TorchCheckpointIO):
    """Saves Lightning's checkpoints to shared memory, persists them in the background, and loads the newest.

    Several ranks need `FastDDPStrategy`. Files are removed once durable and not the newest.

    Args:
        checkpoint_dir: Directory that all nodes share; best the ``dirpath`` of ModelCheckpoint.
        overlap: Copy optimizer parameters and states in the next forward and backward (docs/guides/saving.md).
        weights_only: As for `DdpCheckpointer`; so are ``verify``, ``remote`` and ``remote_deletion_strategy``.

    Attributes:
        loaded_step: Loaded global step; -1 if none.
        loaded_from: Tier of the load; "" if none.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        overlap: bool = False,
        weights_only: bool = True,
        verify: str = "resume",
        remote: str | os.PathLike[str] = "",
        remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
    ) -> None:
        self.overlap, self._weights_only = overlap, weights_only
        self.for_all_ranks = False  # a strategy of ours has all ranks call this
        self.has_ended = False  # the trainer is done: Lightning itself writes later saves
        self.loaded_step = -1
        self.loaded_from = ""
        self._directory = normalised(checkpoint_dir)
        self._new_saves = partial(
            Saves,
            self._directory,
            weights_only=weights_only,
            verify=verify,
            remote=remote,
            remote_deletion_strategy=remote_deletion_strategy,
        )
        self._saves: Saves | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._removal = Removal()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint. Training may continue after the call.

        Args:
            checkpoint: State that Lightning collected.
            path: Its file, which appears once it is durable.
            storage_options: None, or a ``StorageType``; MEMORY writes no file.

        Raises:
            TypeError: Other ``storage_options``.
            ConfigError: Only some ranks take part.
            (NotLoadable, ArenaTooSmall): As `DdpCheckpointer.save_checkpoint`.
        """
        if not isinstance(storage_options, StorageType | None):
            raise TypeError(
                f"storage_options is {storage_options!r}; give None, StorageType.MEMORY or StorageType.DISK"
            )
        step, path = checkpoint["global_step"], os.fspath(path)
        self._removal.keep(path)
        # Nothing is resumed from either: one file, written at once.
        if "optimizer_states" not in checkpoint or self.has_ended:
            self._write(checkpoint, path, "it is not for going on with training")
            return
        saves = self._open()
        if storage_options is StorageType.MEMORY:
            if not saves.has_saved(checkpoint):
                saves.save(step, checkpoint, "", StorageType.MEMORY)
        elif not (result := saves.save(step, checkpoint, path, StorageType.DISK)):
            saves.settle_storage()  # Lightning counts on its file: rather wait than be without it
            if not saves.save(step, checkpoint, path, StorageType.DISK):
                self._write(checkpoint, path, result.reason)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, such as for a test; NEWEST loads as ``resume``.

        Args:
            path: Its file.
            map_location: As for ``torch.load``.
            weights_only: As for ``torch.load``; None: as of the plugin.
        """
        if os.fspath(path) == NEWEST:
            return self.resume()
        if self._saves is not None:
            self._saves.settle_storage()
        where = map_location or (lambda storage, _: storage)
        weights_only = self._weights_only if weights_only is None else weights_only
        loaded: dict[str, Any] = super().load_checkpoint(os.fspath(path), where, weights_only)
        return loaded

    def resume(self, path: str | os.PathLike[str] = "") -> dict[str, Any]:
        """Load the newest checkpoint that all ranks can load, to continue training; empty if nothing was saved.

        All ranks call it. Random generators are restored.

        Args:
            path: File to load instead, also one of Lightning. Restarted workers: as for
                `DdpCheckpointer.load_checkpoint`.

        Raises:
            (NoLoadableCheckpoint, BadCheckpoint, ConfigError): As `DdpCheckpointer.load_checkpoint`.
        """
        saves = self._open()
        state = saves.load(os.fspath(path))
        self.loaded_step, self.loaded_from = state.get("global_step", -1), saves.loaded_from
        return state or Nothing()

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, as soon as it is durable and not the newest: until then it may be all that there is."""
        self._removal.remove(os.fspath(path))
        self._remove()

    def teardown(self) -> None:
        """Wait until all files are there, unless training has failed, and release memory."""
        if self._saves is None:
            return
        # After an exception other ranks may be gone: waiting for them could last until a timeout.
        if sys.exc_info()[0] is None:
            self._saves.settle_storage()
            self._remove()
        self._saves.close()
        self._saves, self._optimizers, self.has_ended = None, [], self.for_all_ranks

    def overlap_with(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Register the optimizers that change parameters and their own states, if ``overlap`` was asked for."""
        if self.overlap:
            self._optimizers = optimizers
            if self._saves is not None:
                self._saves.overlap_with(optimizers)

    @property
    def _rank(self) -> int:
        return RankInfo.from_environment().rank

    def _remove(self) -> None:
        if self._rank == 0:
            is_busy = self._saves is not None and self._saves.is_busy
            self._removal.carry_out(self._directory, super().remove_checkpoint, is_busy=is_busy)

    def _open(self) -> Saves:
        if self._saves is None:
            world = RankInfo.from_environment().world_size
            if world > 1 and not self.for_all_ranks:
                raise ConfigError(
                    f"of {world} ranks only the first calls this plugin: give the trainer a strategy of ours, such as "
                    "Trainer(strategy=FastDDPStrategy(), plugins=[FastCheckpointIO(...)])"
                )
            self._saves = self._new_saves()
            if self._optimizers:
                self._saves.overlap_with(self._optimizers)
        return self._saves

    def _write(self, checkpoint: dict[str, Any], path: str, why: str) -> None:
        """Have Lightning write the file itself, at once."""
        if self._rank == 0:
            logger.info("%s is written by Lightning itself: %s", path, why)
            super().save_checkpoint(checkpoint, path)
