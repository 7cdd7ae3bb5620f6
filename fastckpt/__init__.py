"""Shared-memory checkpoints for PyTorch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastckpt.ddp import (
        CheckpointDeletionStrategy,
        DdpCheckpointer,
        KeepAnyStrategy,
        KeepBestStrategy,
        KeepLatestStepStrategy,
        KeepStepIntervalStrategy,
        KeepTimeIntervalStrategy,
        SaveResult,
        StorageType,
        phase,
        settle,
    )

__all__ = [
    "CheckpointDeletionStrategy",
    "DdpCheckpointer",
    "KeepAnyStrategy",
    "KeepBestStrategy",
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
        from fastckpt import ddp

        return getattr(ddp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
