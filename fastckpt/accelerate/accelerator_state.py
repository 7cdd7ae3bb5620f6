"""Saves and loads the state of an Accelerator, by its own functions and under its own names."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_WEIGHTS_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
    DistributedType,
)
from accelerate.utils.other import clean_state_dict_for_safetensors

from fastckpt._core.base_checkpointer import BaseCheckpointer
from fastckpt._core.client.collective import agreement
from fastckpt._core.client.save_results import at_least
from fastckpt._core.config import RankInfo
from fastckpt._core.native.checkpoint_names import is_foreign
from fastckpt._core.native.folder_checkpointer import CheckpointNames, FolderCheckpointer, Raw, RequiredFiles, Tensors
from fastckpt._core.native.view import read_json, written
from fastckpt._core.resume.directory_checks import refuse_foreign
from fastckpt._core.retention import CheckpointDeletionStrategy
from fastckpt._core.session import SaveResult, SessionOptions, StorageType
from fastckpt.accelerate import _private as private
from fastckpt.dcp.python_values import check_shards
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

MAIN = f"{OPTIMIZER_NAME}.bin"
"""The file that every checkpoint of a job with accelerate has."""
EPOCHS = "epochs.json"
"""The epoch of each prepared loader; accelerate itself saves none."""
_WHOLE = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_MUSA",
    "MULTI_SDAA",
    "MULTI_XPU",
    "MULTI_HPU",
)
"""Ways to distribute a job in which each rank has the whole state."""


class AccelerateCheckpointer(BaseCheckpointer):
    """Saves the files of ``accelerator.save_state``, under the same names; ``accelerator.load_state`` reads them.

    Every rank constructs one after ``accelerator.prepare``. accelerate loads registered objects with
    ``weights_only=False``, which may run code of a file.

    Args:
        accelerator: Accelerator with the prepared and registered objects.
        checkpoint_dir: As for `DdpCheckpointer`; so are ``deletion_strategy``, ``verify``, ``remote`` and
            ``remote_deletion_strategy``.
        overlap: Copy optimizer parameters and states in the next forward and backward (docs/guides/saving.md).

    Raises:
        ConfigError: Unsupported distributed type or launcher.
        PlaceInUse: As for `DdpCheckpointer`.

    Attributes:
        loaded_step: Loaded step; -1 if none, or if another program saved it.
        loaded_from: Tier of the load; "" if none.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        *,
        overlap: bool = False,
        verify: str = "resume",
        remote: str | os.PathLike[str] = "",
        remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
    ) -> None:
        self._accelerator = accelerator
        _check(accelerator)
        private.count_skipped_epochs(accelerator)
        self._own = f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl"
        optimizers = [optimizer.optimizer for optimizer in private.optimizers(accelerator)]
        self._folders = FolderCheckpointer(
            checkpoint_dir,
            RequiredFiles(MAIN, self._own),
            deletion_strategy,
            SessionOptions(
                weights_only=False,
                verify=verify,
                overlap=optimizers if overlap else None,
                remote=remote,
                remote_deletion_strategy=remote_deletion_strategy,
            ),
        )
        self._writer = self._folders.session
        self._all_have_hooks: bool | None = None
        self._has_warned = False
        self.loaded_step = -1
        self.loaded_from = ""

    def save_state(
        self,
        step: int,
        storage_type: StorageType | None = None,
        *,
        name: str = "",
        safe_serialization: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveResult:
        """Save the state of a step; all ranks call it. The state may be changed after the call.

        Args:
            step: Step, not smaller than the last one saved.
            storage_type: As for `DdpCheckpointer.save_checkpoint`; with ``name`` or ``metrics``, the default is DISK.
            name: Name of its directory; default ``checkpoint-<step>``.
            safe_serialization: As for ``accelerator.save_state``: weights in safetensors.
            metrics: As for `DdpCheckpointer.save_checkpoint`.

        Raises:
            ConfigError: No optimizer was prepared, or ``name`` is no name for a directory.
            (StepError, NotLoadable, ArenaTooSmall): As `DdpCheckpointer.save_checkpoint`.
        """
        if not private.optimizers(self._accelerator):
            raise ConfigError(
                "there is no optimizer to save: prepare it with accelerator.prepare(...), then construct the "
                "AccelerateCheckpointer; to hand on weights alone, use accelerator.save_model"
            )
        if not self._accelerator.sync_gradients and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "step %d is in the middle of an accumulation of %d batches, whose gradients are not saved: a resume of "
                "it would lose them. Call save_state where accelerator.sync_gradients is True",
                step,
                self._accelerator.gradient_accumulation_steps,
            )
        accelerator, place = self._accelerator, at_least(storage_type, name)
        optimizers = [each.optimizer for each in private.optimizers(accelerator)]
        others = {f"custom_checkpoint_{i}": each for i, each in enumerate(private.custom_objects(accelerator))}
        broadcast = private.broadcasts_buffers(accelerator)
        self._folders.compare(step, private.models(accelerator), optimizers, place, others, broadcast=broadcast)
        shared, own = self._files(safe_serialization)
        files = shared | own if self._folders.writes_common else own
        return self._folders.save_checkpoint(
            step,
            files,
            place,
            common=shared.keys(),
            named=CheckpointNames(name),
            metrics=metrics,
        )

    def load_state(self, path: str | os.PathLike[str] = "", **load_state_kwargs: Any) -> int:
        """Load the newest checkpoint that all ranks can load, from memory if possible; all ranks call it.

        Args:
            path: Directory of this class or ``accelerator.save_state`` to load instead. Restarted workers: as for
                `DdpCheckpointer.load_checkpoint`.
            **load_state_kwargs: For ``accelerator.load_state``.

        Returns:
            The step; 0 if nothing was saved; -1 if ``accelerator.save_state`` wrote ``path``.

        Raises:
            (NoLoadableCheckpoint, BadCheckpoint, ConfigError): As `DdpCheckpointer.load_checkpoint`.
        """
        folder = self._folders.find(path, foreign=is_foreign(path))
        if folder is None:
            refuse_foreign(self._writer.directory, self._writer.ranks)
            return 0
        with folder:
            if not (folder.path / self._own).is_file():
                logger.warning("%s is not in %s: this rank's random state is not restored", self._own, folder.path)
            check_shards(folder.path)  # accelerate loads those of FSDP by torch's reader, which unpickles anything
            self._accelerator.load_state(str(folder.path), **load_state_kwargs)
            self._set_epochs(folder.path / EPOCHS)
        self.loaded_step, self.loaded_from = folder.step, folder.tier
        return folder.step

    def _files(self, safe: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Files common to all ranks, and this rank's own, by the names that accelerate gives them."""
        accelerator = self._accelerator
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in private.models(accelerator)]
        files, own = self._divided(self._files_of_hooks(weights))
        files |= {
            _numbered(SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME, i): _file(w, safe) for i, w in enumerate(weights)
        }
        for kind, parts in (
            (OPTIMIZER_NAME, private.optimizers(accelerator)),
            (SCHEDULER_NAME, private.schedulers(accelerator)),
        ):
            files |= {_numbered(f"{kind}.bin", i): part.state_dict() for i, part in enumerate(parts)}
        for i, loader in enumerate(private.dataloaders(accelerator)):
            files |= _positions(loader, i)
        if accelerator.scaler is not None:
            files[SCALER_NAME] = accelerator.scaler.state_dict()
        for i, part in enumerate(private.custom_objects(accelerator)):
            files[f"custom_checkpoint_{i}.pkl"] = part.state_dict()
        files[EPOCHS] = Raw(json.dumps(self._epochs()).encode())
        return files, own | {self._own: self._random_states()}

    def _epochs(self) -> list[int]:
        """The epoch of each prepared loader, which decides the order of its samples.

        A loader of ``skip_first_batches`` counts by itself, and leaves the one that it was made of an epoch behind.
        """
        loaders = private.dataloaders(self._accelerator)
        running = self._accelerator.gradient_state.active_dataloader
        epochs = [getattr(loader, "iteration", 0) for loader in loaders]
        if running is not None and all(running is not loader for loader in loaders):
            for i, loader in enumerate(loaders):
                if loader.dataset is running.dataset and hasattr(running, "iteration"):
                    epochs[i], loader.iteration = running.iteration, running.iteration + 1
        return epochs

    def _set_epochs(self, file: Path) -> None:
        loaders = private.dataloaders(self._accelerator)
        if not file.is_file():
            logger.warning(
                "%s has no epochs of data loaders, as neither accelerate nor earlier versions save them: call "
                "set_epoch() on the loader before each epoch, else the order is that of epoch 0",
                file.parent,
            )
            return
        for loader, epoch in zip(loaders, read_json(file, _are_epochs), strict=False):
            if hasattr(loader, "iteration"):
                loader.iteration = epoch

    def _files_of_hooks(self, weights: list[Any]) -> dict[str, Any]:
        """Files that hooks of save_state write; hooks may take weights off the list that they write themselves."""
        hooks = private.save_hooks(self._accelerator)
        if not hooks:
            return {}
        place = self._folders.scratch()
        for hook in hooks:
            hook(private.models(self._accelerator), weights, str(place))
        return dict(written(place))

    def _divided(self, files: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divide the files of hooks here: those that the first rank has, too, and those that no earlier rank has."""
        accelerator = self._accelerator
        ranks = agreement(accelerator.num_processes, "hooks of accelerate")
        if self._all_have_hooks is None:
            self._all_have_hooks = all(ranks.gather(bool(private.save_hooks(accelerator))))
        if not self._all_have_hooks:
            return files, {}
        said = ranks.gather([*files])
        before = {name for names in said[: accelerator.process_index] for name in names}
        mine = {name: each for name, each in files.items() if name not in before}
        return {name: each for name, each in files.items() if name in said[0]}, mine

    def _random_states(self) -> dict[str, Any]:
        """Random generators of all kinds that accelerate itself saves, and its count of steps."""
        accelerator, place = self._accelerator, self._folders.scratch()
        with _quiet():
            save_accelerator_state(str(place), [], [], [], [], accelerator.process_index, accelerator.step)
        states: dict[str, Any] = torch.load(place / self._own, weights_only=False)
        return states


def _are_epochs(found: Any) -> bool:
    return isinstance(found, list) and all(type(each) is int and each >= 0 for each in found)


def _check(accelerator: Accelerator) -> None:
    kind, place = DistributedType(accelerator.distributed_type), RankInfo.from_environment()
    if kind is DistributedType.DEEPSPEED:
        raise ConfigError(
            "DeepSpeed writes its checkpoints itself: give its engine to a fastckpt.deepspeed checkpointer"
        )
    if kind.value not in _WHOLE:
        raise ConfigError(
            f"an AccelerateCheckpointer cannot save a training that is distributed by {kind.value}: accelerate writes "
            "its files itself, before it calls any hook. See docs/guides/integrations.md for other ways."
        )
    if accelerator.num_processes != place.world_size:
        raise ConfigError(
            f"accelerate has {accelerator.num_processes} processes, but the launcher has started {place.world_size}: "
            "start the script with fastckpt-run"
        )


def _numbered(name: str, index: int) -> str:
    """The name that accelerate gives to the n-th of a kind."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}_{index}.{ending}" if index else name


def _file(weights: Mapping[str, Any], safe: bool) -> Any:
    return Tensors(clean_state_dict_for_safetensors(dict(weights)), {"format": "pt"}) if safe else weights


def _positions(loader: Any, index: int) -> dict[str, Any]:
    """The position of a loader in its data, if accelerate saves positions of its kind."""
    from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler

    files = {}
    if isinstance(loader.dataset, IterableDatasetShard) and isinstance(loader.get_sampler(), SeedableRandomSampler):
        files[_numbered(f"{SAMPLER_NAME}.bin", index)] = loader.get_sampler()
    if getattr(loader, "use_stateful_dataloader", False):
        files[_numbered("dl_state_dict.bin", index)] = loader.state_dict()
    return files


@contextlib.contextmanager
def _quiet() -> Any:
    """Silence accelerate's lines on each file that it writes: these are not at the paths that it names."""
    log = logging.getLogger("accelerate.checkpointing")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(level)
