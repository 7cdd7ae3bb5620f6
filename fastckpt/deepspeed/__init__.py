"""Checkpoints for DeepSpeed, in its own files."""

from fastckpt._core.client.save_results import SaveResult, StorageType
from fastckpt._core.retention import (
    CheckpointDeletionStrategy,
    KeepAnyStrategy,
    KeepBestStrategy,
    KeepEpochStrategy,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
    KeepTimeIntervalStrategy,
)
from fastckpt.deepspeed.engine_checkpointer import DeepSpeedCheckpointer
from fastckpt.deepspeed.engine_files import files_of, loading, reads

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
