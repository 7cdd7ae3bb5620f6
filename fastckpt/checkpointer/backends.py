"""Frameworks that save trainings: a model tells by its types which one it needs, and no other is imported."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Protocol, cast

from torch.nn import Module
from torch.optim import Optimizer

from fastckpt._core.retention import CheckpointDeletionStrategy
from fastckpt._core.session import SaveResult, Session, StorageType
from fastckpt.checkpointer.state import Part, TrainingState

WHOLE, SHARDED = (
    "fastckpt.checkpointer.replicated_backend.ReplicatedBackend",
    "fastckpt.checkpointer.sharded_backend.ShardedBackend",
)
"""For trainings of which all ranks have the whole state, and of which each has a part."""
_HOMES: dict[str, str] = {}


class Backend(Protocol):
    """Saves and loads trainings of one kind; each rank makes one, and all call the same methods alike.

    Attributes:
        FROM_OTHERS: How a training goes on from checkpoints of other frameworks, in a sentence.
        loaded_step: The step that was loaded.
    """

    FROM_OTHERS: ClassVar[str]
    _writer: Session

    def __init__(  # those of users
        self,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy,
        *,
        overlap: Sequence[Optimizer],
        weights_only: bool,
        verify: str,
        remote: str | os.PathLike[str],
        remote_deletion_strategy: CheckpointDeletionStrategy | None,
    ) -> None:
        """``overlap`` are the optimizers whose parameters and states are copied in the background.

        A backend of models that are staged takes ``stage``, too.
        """
        ...

    @property
    def loaded_step(self) -> int: ...  # noqa: D102

    @classmethod
    def parts(cls, parts: Mapping[str, Part], *, gradients: bool, staged: bool = False) -> Mapping[str, Part]:
        """What has the states of these parts of a training.

        Args:
            parts: By name: "model", which is in no wrapper of torch's, "optimizer", "scheduler", and what a user named.
            gradients: Whether ``.grad`` of the parameters is to be saved for each rank.
            staged: Whether other ranks have other models, as of the stages of a pipeline.

        Raises:
            ConfigError: A training of these cannot be saved.
        """
        ...

    def resume(self, parts: TrainingState, own: dict[str, Any]) -> Mapping[str, Any]:
        """Load the newest checkpoint that all ranks can load into all parts.

        Args:
            parts: Of the training.
            own: What will be saved beside them, to make memory ready if there is no checkpoint.

        Returns:
            What there is in the checkpoint, by name; empty if nothing was ever saved.

        Raises:
            NoLoadableCheckpoint: Checkpoints exist, but none can be loaded.
            ConfigError: Parts are missing in it, or do not fit.
        """
        ...

    def save_checkpoint(
        self,
        step: int,
        state_dict: dict[str, Any],
        *,
        storage_type: StorageType,
        rank_state: dict[str, Any],
        metrics: Mapping[str, float],
    ) -> SaveResult:
        """Save what parts have in common, and what this rank has beside it. Once it returns, it may be changed."""
        ...

    def close(self) -> None:
        """End saving."""
        ...


def register(type_name: str, home: str) -> None:
    """Have models be saved by a framework if one of their modules or parameters is of a type.

    Args:
        type_name: The type, or one that it derives from, such as "deepspeed.runtime.engine.DeepSpeedEngine".
        home: The class that fulfils `Backend`, such as
            "fastckpt.checkpointer.sharded_backend.ShardedBackend": imported when it is needed.
    """
    _HOMES[type_name] = home


def backend_of(model: Module, *, staged: bool = False) -> type[Backend]:
    """The framework that saves trainings of this model; ``staged`` as for `Backend.parts`."""
    things = {type(each) for each in model.modules()} | {type(each) for each in model.parameters()}
    names = {f"{base.__module__}.{base.__qualname__}" for each in things for base in each.__mro__}
    home = next((home for type_name, home in _HOMES.items() if type_name in names), SHARDED if staged else WHOLE)
    module, _, name = home.rpartition(".")
    return cast(type[Backend], getattr(import_module(module), name))


register("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel", SHARDED)
register("torch.distributed.fsdp.FSDPModule", SHARDED)
register("torch.distributed.tensor.DTensor", SHARDED)
register("deepspeed.runtime.engine.DeepSpeedEngine", "fastckpt.deepspeed.refusal.Refused")
