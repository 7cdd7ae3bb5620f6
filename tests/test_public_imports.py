"""Imports that users have written, and that keep working wherever the code behind them goes."""

import importlib.util

import pytest

from tests.support.forked_imports import run_imports

IMPORTS = {
    "fastckpt": (
        "CheckpointDeletionStrategy", "Checkpointer", "DdpCheckpointer", "FsdpFullCheckpointer",
        "FsdpShardCheckpointer", "KeepAnyStrategy", "KeepBestStrategy", "KeepEpochStrategy", "KeepLatestStepStrategy",
        "KeepStepIntervalStrategy", "KeepTimeIntervalStrategy", "SaveResult", "StorageType", "metrics", "phase",
        "settle",
    ),
    "fastckpt.accelerate": ("AccelerateCheckpointer", "StorageType"),
    "fastckpt.checkpointer": ("Checkpointer", "SaveResult", "StorageType"),
    "fastckpt.data": ("DataState", "ResumableDataLoader", "ResumableSampler", "data_state", "load_data_state"),
    "fastckpt.dcp": ("SaveResult", "SharedMemoryReader", "SharedMemoryStager", "SharedMemoryWriter", "StorageType"),
    "fastckpt.ddp": ("DdpCheckpointer", "KeepStepIntervalStrategy", "SaveResult", "StorageType", "phase", "settle"),
    "fastckpt.deepspeed": ("DeepSpeedCheckpointer", "KeepLatestStepStrategy", "StorageType", "files_of"),
    "fastckpt.errors": ("ConfigError", "FastckptError", "NoLoadableCheckpoint", "StepError"),
    "fastckpt.fsdp": ("FsdpFullCheckpointer", "FsdpShardCheckpointer", "SaveResult", "StorageType"),
    "fastckpt.huggingface": (
        "CheckpointOptions", "FastCheckpointMixin", "FastCheckpointTrainer", "FlashCkptTrainer", "get_last_checkpoint",
    ),
    "fastckpt.lightning": ("NEWEST", "FastCheckpointIO", "FastDDPStrategy", "MemoryCheckpoint"),
}  # fmt: skip
NEEDS = {"fastckpt.accelerate": "accelerate", "fastckpt.deepspeed": "deepspeed", "fastckpt.huggingface": "transformers"}
NEEDS |= {"fastckpt.lightning": "lightning"}


def test_public_imports_of_earlier_versions_work() -> None:
    missing = {module for module, needed in NEEDS.items() if importlib.util.find_spec(needed) is None}
    done = run_imports({module: (names, ()) for module, names in IMPORTS.items() if module not in missing})
    assert done.returncode == 0, done.stderr
    if missing:
        pytest.skip(f"not installed, and so not imported: {', '.join(sorted(missing))}")
