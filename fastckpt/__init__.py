"""Shared-memory checkpoints for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastckpt._core import torch_version

if TYPE_CHECKING:
    from fastckpt._core import metrics
    from fastckpt.checkpointer.checkpointer import Checkpointer
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
    from fastckpt.fsdp.shards import FsdpFullCheckpointer, FsdpShardCheckpointer

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
    "metrics",
    "phase",
    "settle",
]

_HOMES = {
    "Checkpointer": "fastckpt.checkpointer.checkpointer",
    "FsdpFullCheckpointer": "fastckpt.fsdp",
    "FsdpShardCheckpointer": "fastckpt.fsdp",
}


torch_version.check()


def __getattr__(name: str) -> Any:
    """Import on first use: the launcher needs none of these, and the agent stays small."""
    if name == "metrics":
        return import_module("fastckpt._core.metrics")
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "fastckpt.ddp")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
