"""Shared-memory checkpoints for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastckpt import torch_version

if TYPE_CHECKING:
    from fastckpt.ddp import (
        CheckpointDeletionStrategy,
        DdpCheckpointer,
        KeepAnyStrategy,
        KeepBestStrategy,
        KeepEpochStrategy,
        KeepLatestStepStrategy,
        KeepStepIntervalStrategy,
        KeepTimeIntervalStrategy,
        SaveResult,
        StorageType,
        phase,
        settle,
    )
    from fastckpt.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer
    from fastckpt.loop import Checkpointer

__all__ = [
    "CheckpointDeletionStrategy",
    "Checkpointer",
    "DdpCheckpointer",
    "FsdpFullCheckpointer",
    "FsdpShardCheckpointer",
    "KeepAnyStrategy",
    "KeepBestStrategy",
    "KeepEpochStrategy",
    "KeepLatestStepStrategy",
    "KeepStepIntervalStrategy",
    "KeepTimeIntervalStrategy",
    "SaveResult",
    "StorageType",
    "phase",
    "settle",
]

_HOMES = {
    "Checkpointer": "fastckpt.loop",
    "FsdpFullCheckpointer": "fastckpt.fsdp",
    "FsdpShardCheckpointer": "fastckpt.fsdp",
}


torch_version.check()


def __getattr__(name: str) -> Any:
    """Import on first use: the launcher needs none of these, and the agent stays small."""
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "fastckpt.ddp")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
