"""The files of a Trainer's checkpoint that one rank saves, under the names that transformers gives them."""

import contextlib
import copy
import io
import logging
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from fastckpt._core.native.folder_checkpointer import Raw, RequiredFiles
from fastckpt._core.native.view import written
from fastckpt.huggingface import _private as private
from fastckpt.huggingface.checkpoint_folder import TrainerFolder
from fastckpt.huggingface.weights import WEIGHTS, Weights, is_adapted

logger = logging.getLogger("fastckpt")

STATE, ARGUMENTS = "trainer_state.json", "training_args.bin"
OPTIMIZER, SCHEDULER, SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
SHARDED_MODEL, SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_OF_RANK = re.compile(r"(rng_state|unlogged_loss|global_step)|.*/__[0-9]+_[0-9]+\.distcp$|.*_rank[0-9]+")
_NOWHERE = "not in memory"
"""A file without which the memory of one of several nodes is never enough."""


class TrainerFiles:
    """Makes the files of one rank for each save.

    Large files come from live tensors. Small ones, and those made in an unknown way, such as by methods that a subclass
    overrides, are written by Trainer's own methods to a directory in memory, and taken from it.
    """

    def __init__(self, trainer: Trainer, folder: TrainerFolder) -> None:
        self._trainer = trainer
        self._folder = folder
        self._small: dict[str, Any] = {}
        self._small_of: object = None
        self._weights = Weights()
        self._warned: set[str] = set()
        self._only_model = False

    def files(self, step: int, *, lasting: bool) -> dict[str, Any]:
        """This rank's files of a step; ``lasting`` ones are for storage. Raises Unplanned.

        ``save_only_model`` applies to storage: a save to memory has all that a resume needs.
        """
        # 1. the model's weights from live tensors, else by Trainer's own method   2. optimizer, scheduler, scaler and
        # generators   3. Trainer's state, in the first rank of each node   4. small files that were written to memory
        # 5. of several nodes, files that must be equal on all, as the first rank has them
        trainer, scratch = self._trainer, self._folder.scratch()
        self._only_model = lasting and trainer.args.save_only_model
        arguments = _saved(trainer.args) if self._folder.has_other_nodes else b""
        with _saving_on_each_node(trainer.args, self._folder):
            files = self._model(scratch, lasting=lasting)
            if not self._only_model:
                files |= self._optimizer(scratch, step, lasting=lasting) | self._scaler(scratch)
                private.save_rng_state(trainer, scratch)
        if self._folder.writes_common:
            self._state(scratch, lasting=lasting)
        files |= written(scratch)
        if self._folder.has_other_nodes:
            files |= _of_first_rank({STATE: files.get(STATE), ARGUMENTS: Raw(arguments)}, files)
        return files

    def common(self, files: Collection[str]) -> list[str]:
        """Files that the first rank of each node saves with equal contents."""
        return [name for name in files if self._folder.writes_common and not _OF_RANK.match(name)]

    def _model(self, scratch: Path, *, lasting: bool) -> dict[str, Any]:
        trainer = self._trainer
        if trainer.is_fsdp_enabled and shards_state(trainer) and not self._overrides("save_model"):
            return {}  # as Trainer: all of it is in the shards
        reason = self._overrides("save_model", private.SAVE_MODEL) or self._objection()
        if reason:
            self._warn("the model", reason)
            trainer.save_model(str(scratch), _internal_call=True)
            return {}
        if not self._folder.writes_common:
            return {}
        weights = {} if _is_sharded_by_engine(trainer) else self._weights.files(trainer.model)
        if lasting or not self._small or self._small_of is not self._weights.layout:
            private.save_model(trainer, scratch, None if is_adapted(trainer.model) else {})
            self._small = written(scratch, but={*weights, WEIGHTS})  # this would have no weights
            self._small_of = self._weights.layout
            for entry in scratch.iterdir():
                # Emptied, because the files of Trainer's other methods next to it are taken as a whole.
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return self._small | weights

    def _optimizer(self, scratch: Path, step: int, *, lasting: bool) -> dict[str, Any]:
        trainer = self._trainer
        reason = self._overrides(private.SAVE_OPTIMIZER)
        if trainer.is_fsdp_enabled and not shards_state(trainer):
            reason = reason or "it is not sharded by FSDP2"
        if reason:
            self._warn("the optimizer", reason)
            private.save_optimizer(trainer, scratch)
            return {}
        if trainer.is_deepspeed_enabled:
            return _of_engine(trainer, scratch) | self._scheduler()
        files = self._scheduler()
        if trainer.is_fsdp_enabled:
            files |= self._folder.shard_files(step, _sharded(trainer), together=lasting)
        elif self._folder.writes_common:
            files[OPTIMIZER] = trainer.optimizer.state_dict()
        return files

    def _scheduler(self) -> dict[str, Any]:
        scheduler = self._trainer.lr_scheduler
        is_the_engines = self._trainer.is_deepspeed_enabled and isinstance(scheduler, DeepSpeedSchedulerWrapper)
        return {SCHEDULER: scheduler.state_dict()} if self._folder.writes_common and not is_the_engines else {}

    def _scaler(self, scratch: Path) -> dict[str, Any]:
        trainer = self._trainer
        if self._overrides(private.SAVE_SCALER):
            private.save_scaler(trainer, scratch)
            return {}
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {SCALER: scaler.state_dict()} if scaler is not None and self._folder.writes_common else {}

    def _state(self, scratch: Path, *, lasting: bool) -> None:
        """State that Trainer writes last, and not in a method of its own."""
        state, callbacks = self._trainer.state, self._trainer.callback_handler.callbacks
        before = copy.deepcopy(state.stateful_callbacks)
        for callback in [*callbacks, self._trainer.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(state.stateful_callbacks[name], list):
                    state.stateful_callbacks[name].append(callback.state())
                else:
                    state.stateful_callbacks[name] = callback.state()
        state.save_to_json(str(scratch / STATE))
        if not lasting:  # as if there had been no save
            state.stateful_callbacks = before

    def _objection(self) -> str:
        """The reason why only Trainer can save its model; empty if there is none."""
        trainer = self._trainer
        if not _is_sharded_by_engine(trainer):
            return "it is sharded" if trainer.is_fsdp_enabled else self._weights.objection(trainer.model)
        if trainer.model_wrapped.zero_gather_16bit_weights_on_model_save():
            return "it is gathered, as stage3_gather_16bit_weights_on_model_save asks"
        unlike = self._only_model or is_adapted(trainer.model)
        return "it is sharded, and not all of it is saved" if unlike else ""

    def _overrides(self, *methods: str) -> str:
        """Methods of Trainer, of those named, that a subclass has overridden; empty for none."""
        own = {name: getattr(self._trainer, name) for name in methods}  # also those that were given to this one alone
        found = [name for name, each in own.items() if getattr(each, "__func__", None) is not getattr(Trainer, name)]
        return f"{type(self._trainer).__name__} has its own {' and '.join(found)}" if found else ""

    def _warn(self, what: str, reason: str) -> None:
        if what not in self._warned and self._folder.writes_common:
            self._warned.add(what)
            logger.warning("%s is written by Trainer itself in each save, which takes time: %s", what, reason)


def needs(trainer: Trainer) -> RequiredFiles:
    """Files that a checkpoint of a Trainer must have to be whole for this rank."""
    rank, world = trainer.args.process_index, trainer.args.world_size
    shards: tuple[str, ...] = (f"rng_state_{rank}.pth",)
    if trainer.args.save_only_model:
        shards = ()
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        known = trainer.is_fsdp_enabled and shards_state(trainer)
        folders = (SHARDED_MODEL, SHARDED_OPTIMIZER)
        shards += (
            tuple(f"{each}/__{number}_0.distcp" for each in folders for number in range(world))
            if known
            else (_NOWHERE,)
        )
    return RequiredFiles(STATE, STATE, shards, from_peers=True)


def has_only_model(checkpoint: Path) -> bool:
    """Return whether ``save_only_model`` has left out all else."""
    return not any(checkpoint.glob("rng_state*.pth"))


def shards_state(trainer: Trainer) -> bool:
    """Return whether FSDP2 shards the trainer's state, and each rank saves its shards."""
    plugin = trainer.accelerator.state.fsdp_plugin
    is_sharded = plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    return plugin.fsdp_version == 2 and is_sharded and not is_adapted(trainer.model)


def _sharded(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Objects that accelerate passes to DCP, by the directories that it makes of them."""
    plugin = trainer.accelerator.state.fsdp_plugin
    options = StateDictOptions(
        full_state_dict=False,
        cpu_offload=getattr(plugin.state_dict_config, "offload_to_cpu", False),
        broadcast_from_rank0=getattr(plugin.state_dict_config, "rank0_only", False),
    )
    model = trainer.model
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {
        SHARDED_MODEL: {"model": get_model_state_dict(model, options=options)},
        SHARDED_OPTIMIZER: {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)},
    }


def _is_sharded_by_engine(trainer: Trainer) -> bool:
    """Return whether it is ZeRO 3 of DeepSpeed, so that no rank has the weights."""
    return bool(trainer.is_deepspeed_enabled and trainer.model_wrapped.zero_optimization_partition_weights())


def _of_engine(trainer: Trainer, scratch: Path) -> dict[str, Any]:
    """Files that a DeepSpeed engine saves: in a directory, with a file next to it that names this."""
    from fastckpt.deepspeed import files_of

    engine = trainer.model_wrapped
    tag = f"global_step{engine.global_steps}"
    files = files_of(engine, scratch, tag, {}, exclude_frozen_parameters=is_adapted(trainer.model))
    named = {"latest": Raw(tag.encode())} if trainer.args.process_index == 0 else {}
    return {f"{tag}/{name}": each for name, each in files.items()} | named


def _of_first_rank(own: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the files of these names that this rank saves, as the first rank has them: times differ by rank."""
    said = [own]
    dist.broadcast_object_list(said, src=0)
    return {name: each for name, each in said[0].items() if name in names and each is not None}


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@contextlib.contextmanager
def _saving_on_each_node(args: Any, folder: TrainerFolder) -> Iterator[None]:
    """Have Trainer's methods write in the first rank of each node: each has its own files in memory."""
    before = args.save_on_each_node
    args.save_on_each_node = before or folder.has_other_nodes
    try:
        yield
    finally:
        args.save_on_each_node = before
