"""One training run of a Trainer: its resume, its saves, and the wait until all of them are on storage."""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch.distributed as dist
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint as newest_of_stock

from fastckpt._core.native.checkpoint_names import is_foreign
from fastckpt._core.native.folder_checkpointer import NativeFolder, SaveResult, StorageType
from fastckpt._core.policy.retention import KeepLast, KeepNamed
from fastckpt._core.retention import CheckpointDeletionStrategy, PolicyStrategy
from fastckpt._core.session import SessionOptions
from fastckpt._core.snapshot.overlap import optimizers_in
from fastckpt.dcp.python_values import check_shards
from fastckpt.dcp.shard_plans import PlannerDeparted, Unplanned
from fastckpt.errors import ConfigError, PersistError
from fastckpt.huggingface.checkpoint_folder import TrainerFolder
from fastckpt.huggingface.trainer_files import TrainerFiles, has_only_model, needs
from fastckpt.huggingface.unlogged import restore, unlogged

logger = logging.getLogger("fastckpt")

NEWEST: set[str] = set()
"""Path that this process was given for the newest checkpoint: a load from it means the newest one."""
_STEP = re.compile("checkpoint-([0-9]+)")
BEST = "best_step"
"""The metric of a checkpoint that names the best one by then."""


class CheckpointOptions(TypedDict, total=False):
    """Options of checkpoints; each may be left out.

    Attributes:
        deletion_strategy: Policy for older checkpoints, instead of ``save_total_limit``.
        verify: As for `DdpCheckpointer`; so are ``remote`` and ``remote_deletion_strategy``.
        overlap: Copy optimizer parameters and states during the next forward and backward; default False.
        remote: Second tier.
        remote_deletion_strategy: Policy for older checkpoints there.
    """

    deletion_strategy: CheckpointDeletionStrategy | None
    verify: str
    overlap: bool
    remote: str | os.PathLike[str]
    remote_deletion_strategy: CheckpointDeletionStrategy | None


class TrainerSession:
    """Saves and loads of ``train()``; each rank makes one, and calls each method with the same steps.

    Attributes:
        loaded_step: The step that was loaded; -1 for none.
        loaded_from: Where it was: "memory", "storage", "remote", "mixed"; "" if nothing was loaded.
        saved_step: The last step that was saved; -1 for none.
    """

    def __init__(self, trainer: Trainer, options: CheckpointOptions) -> None:
        check(trainer, options)
        self._trainer = trainer
        self._directory = Path(trainer.args.output_dir)
        self._overlap = options.get("overlap", False)
        self._folder = TrainerFolder(
            self._directory,
            needs(trainer),
            options.get("deletion_strategy") or _rotation(trainer.args),
            SessionOptions(
                weights_only=False,
                verify=options.get("verify", "resume"),
                remote=options.get("remote", ""),
                remote_deletion_strategy=options.get("remote_deletion_strategy"),
            ),
        )
        self._folder.session.count_steps(lambda: int(trainer.state.global_step))
        self._contents = TrainerFiles(trainer, self._folder)
        self._found: NativeFolder | None = None
        self._metrics: tuple[int, dict[str, float]] = (-1, {})
        self._lasting: set[int] = set()
        self.loaded_step, self.loaded_from = -1, ""
        self.saved_step = -1
        self._begun = -1

    def find(self, resume: str | os.PathLike[str] | bool | None) -> str | None:
        """The path for Trainer to load from; None to start afresh.

        Args:
            resume: True for the newest checkpoint that all ranks can load, if there is one; or its directory.

        Raises:
            NoLoadableCheckpoint, BadCheckpoint, ConfigError: As for `FolderCheckpointer.find`.
        """
        if resume is None or resume is False:
            return None
        asked = "" if resume is True or resume in NEWEST else os.fspath(resume)
        NEWEST.difference_update({resume})  # a second request asks for that one
        self._found = self._folder.find(asked, foreign=is_foreign(asked))
        if self._found is None:
            stock = newest_of_stock(self._directory) if self._directory.is_dir() else None
            if stock is None and self._trainer.args.process_index == 0:
                logger.warning("%s holds no checkpoint yet: training starts afresh", self._directory)
            return stock
        check_shards(self._found.path)  # accelerate loads those of FSDP by torch's reader, which unpickles anything
        self.loaded_step, self.loaded_from = self._found.step, self._found.tier
        if has_only_model(self._found.path) and self._trainer.args.process_index == 0:
            logger.warning(
                "step %d has the model alone, as save_only_model asks: optimizer, scheduler and random generators "
                "begin again",
                self.loaded_step,
            )
        return str(self._found.path)

    @property
    def path(self) -> str | None:
        """The path from which Trainer has yet to load; None once it has loaded all."""
        return None if self._found is None else str(self._found.path)

    def loaded(self) -> None:
        """Release the found checkpoint; a second call does nothing."""
        if self._found is not None:
            restore(self._trainer, self._found.path)
            self._found.close()
            self._found = None

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of an evaluation."""
        self._metrics = step, {name: each for name, each in metrics.items() if isinstance(each, int | float)}

    def save(self, storage_type: StorageType) -> SaveResult:
        """Save the trainer's current step; to memory all of it, also with ``save_only_model``."""
        result, trainer = self._save(storage_type), self._trainer
        goes_on = trainer.state.global_step < trainer.state.max_steps and not trainer.control.should_training_stop
        if result.saved and storage_type is StorageType.DISK and trainer.args.save_only_model and goes_on:
            self._save(StorageType.MEMORY)
        return result

    def _save(self, storage_type: StorageType) -> SaveResult:
        # 1. another history, if this step was saved before   2. the files of this rank   3. save, with the metrics that
        # retention needs   4. undo the best checkpoint's name if it was skipped
        trainer, folder = self._trainer, self._folder
        self.loaded()
        step, lasting = trainer.state.global_step, storage_type is StorageType.DISK
        if lasting and step >= trainer.state.max_steps:
            self.wait()  # nothing is stalled any more, and no later checkpoint makes up for this one if it is skipped
        # A step is saved once in a history: another one lets its contents differ.
        if step == self._begun:
            folder.session.begin_history()  # since then it was measured, or its epoch has ended
        self._begun = step  # also if this rank skips it: all ranks must open a history, or none
        if self._overlap and isinstance(optimizer := _torch_optimizer(trainer), Optimizer):
            folder.session.be_ready()
            folder.session.overlap_with(optimizers_in(optimizer))
            self._overlap = False  # from now on it does
        folder.compare(step, [trainer.model_wrapped], [_torch_optimizer(trainer)], storage_type)
        before = trainer.state.best_model_checkpoint
        self._name_best(step, lasting=lasting)
        try:
            files = self._contents.files(step, lasting=lasting) | unlogged(trainer)
        except Unplanned as reason:
            trainer.state.best_model_checkpoint = before
            return folder.session.skip(step, str(reason), is_final=isinstance(reason, PlannerDeparted))
        measured = self._metrics[1] if self._metrics[0] == step else {}
        # not best_global_step: that may be a step which was evaluated and not saved
        best = _STEP.fullmatch(Path(trainer.state.best_model_checkpoint or "").name)
        measured = measured | ({BEST: float(best[1])} if best else {})
        common = self._contents.common(files)
        result = folder.save_checkpoint(step, files, storage_type, common=common, metrics=measured)
        if result.saved:
            self.saved_step = step
            self._lasting |= {step} if lasting else set()
        else:
            trainer.state.best_model_checkpoint = before
            logger.warning("step %d was not saved: %s", step, result.reason)
        return result

    def _name_best(self, step: int, *, lasting: bool) -> None:
        """Name the best checkpoint, as Trainer does once its directory exists; here it may not be durable yet."""
        state = self._trainer.state
        if state.best_global_step:
            best = self._directory / f"checkpoint-{state.best_global_step}"
            on_its_way = state.best_global_step in self._lasting or (lasting and state.best_global_step == step)
            if on_its_way or best.exists():
                state.best_model_checkpoint = os.path.join(self._trainer.args.output_dir, best.name)  # noqa: PTH118

    def wait(self) -> None:
        """Wait until saves for storage are there, for all ranks; trouble is reported, and no reason to fail."""
        self.loaded()
        try:
            self._folder.wait_latest_checkpoint()
        # Training has succeeded: the model is there, and the launcher's report names saves that are not durable.
        except (PersistError, TimeoutError) as error:
            logger.error("the newest checkpoints are not all on storage: %s", error)
        if dist.is_initialized() and self._trainer.args.world_size > 1:
            # Before any rank looks for directories: others' saves are there once all have waited.
            dist.barrier()
        self._settle_best()

    def wait_latest_checkpoint(self, timeout: float) -> None:
        """Wait until saves for storage are there; raises TimeoutError or PersistError."""
        self._folder.wait_latest_checkpoint(timeout)

    def durable(self) -> str | None:
        """The path of the newest durable checkpoint; None if there is none."""
        newest = self._folder.newest_durable()
        return None if newest is None else os.path.join(self._trainer.args.output_dir, f"checkpoint-{newest}")  # noqa: PTH118

    def _settle_best(self) -> None:
        """Settle the best checkpoint once no save is under way: it may be there by now, or never come."""
        state = self._trainer.state
        self._lasting.clear()
        self._name_best(state.global_step, lasting=False)
        if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
            logger.error("the best checkpoint, %s, is not there: the model stays as it is", state.best_model_checkpoint)
            state.best_model_checkpoint = None
        if dist.is_initialized() and self._trainer.args.world_size > 1:
            said = [state.best_model_checkpoint]
            dist.broadcast_object_list(said, src=0)
            state.best_model_checkpoint = said[0]

    def close(self) -> None:
        """End saving; a load that has not ended by then counts as failed."""
        if self._found is not None:
            self._found.close(loaded=False)
            self._found = None
        self._folder.close()


def check(trainer: Trainer, options: CheckpointOptions) -> None:
    """Raise ConfigError for an impossible setting, with what to do instead."""
    args = trainer.args
    if args.push_to_hub and args.hub_strategy != "end":
        raise ConfigError(
            f"push_to_hub with hub_strategy={args.hub_strategy.value!r} sends each checkpoint when it is saved, "
            "which is not on storage yet. Use hub_strategy='end', or push a checkpoint once it is there."
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size begins training again with another batch size, from a checkpoint that is let go by "
            "then. Find the size with transformers' Trainer first, and give it as per_device_train_batch_size."
        )
    if args.save_on_each_node:
        raise ConfigError(
            "save_on_each_node makes a checkpoint on the disk of each node; here all nodes make one, in an output_dir "
            "that they share. Leave it out."
        )
    if options.get("overlap") and trainer.is_deepspeed_enabled:
        raise ConfigError(
            "checkpoint_options has overlap, and DeepSpeed's engine updates weights in its own ways: leave it out, or "
            "train with fastckpt.deepspeed.DeepSpeedCheckpointer, which knows them"
        )
    strategy = options.get("deletion_strategy")
    if strategy is not None and args.save_total_limit:
        raise ConfigError(
            f"save_total_limit={args.save_total_limit} and {type(strategy).__name__} both say what to delete: give one"
        )
    unknown = sorted(options.keys() - CheckpointOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(CheckpointOptions.__annotations__)
        raise ConfigError(f"checkpoint_options has {', '.join(unknown)}; known are {known}")


def _rotation(args: Any) -> CheckpointDeletionStrategy | None:
    """The retention rule of ``save_total_limit``."""
    limit = args.save_total_limit
    if limit is None or limit <= 0:
        return None
    policy = KeepLast(limit) if args.metric_for_best_model is None else KeepNamed(limit, BEST)
    return PolicyStrategy(policy, args.output_dir)


def _torch_optimizer(trainer: Trainer) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)
