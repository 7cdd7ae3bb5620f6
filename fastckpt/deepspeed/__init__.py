"""Checkpoints for DeepSpeed: its own files, in memory and on storage."""

from fastckpt.deepspeed.checkpointer import DeepSpeedCheckpointer
from fastckpt.deepspeed.files import files_of, loading, reads
from fastckpt.engine.deletion import (
    CheckpointDeletionStrategy,
    KeepAnyStrategy,
    KeepBestStrategy,
    KeepEpochStrategy,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
    KeepTimeIntervalStrategy,
)
from fastckpt.engine.result import SaveResult, StorageType

__all__ = [
    "CheckpointDeletionStrategy",
    "DeepSpeedCheckpointer",
    "KeepAnyStrategy",
    "KeepBestStrategy",
    "KeepEpochStrategy",
    "KeepLatestStepStrategy",
    "KeepStepIntervalStrategy",
    "KeepTimeIntervalStrategy",
    "SaveResult",
    "StorageType",
    "files_of",
    "loading",
    "reads",
]
