"""Shared-memory checkpoints for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from fastckpt.loop import Checkpointer

__all__ = [
    "CheckpointDeletionStrategy",
    "Checkpointer",
    "DdpCheckpointer",
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


def __getattr__(name: str) -> Any:
    """Import on first use: the launcher needs none of these, and the agent stays small."""
    if name in __all__:
        return getattr(import_module("fastckpt.loop" if name == "Checkpointer" else "fastckpt.ddp"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
