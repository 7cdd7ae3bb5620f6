"""Imports that users have written keep working wherever the code behind them goes, each with its extra alone."""

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
    "fastckpt_run.watch.watcher": (),  # --fast-tensorboard alone needs more, and says so
    "torch.utils.tensorboard": (),
}  # fmt: skip
NEEDED = {
    "fastckpt.accelerate": ("accelerate", "safetensors"),
    "fastckpt.deepspeed": ("deepspeed",),
    "fastckpt.huggingface": ("transformers", "accelerate", "safetensors"),
    "fastckpt.lightning": ("lightning", "transformers", "safetensors"),  # torchmetrics imports what pip has installed
    "torch.utils.tensorboard": ("tensorboard",),
}
"""What an extra brings, what it needs itself included: of the names of modules, which are hidden from all others."""
ALL = {"peft", "pynvml", "s3fs", "torchdata"}.union(*NEEDED.values())


def test_public_imports_of_earlier_versions_work() -> None:
    missing = {module for module, needed in NEEDED.items() if importlib.util.find_spec(needed[0]) is None}
    there = {module: names for module, names in IMPORTS.items() if module not in missing}
    done = run_imports({module: (names, ALL.difference(NEEDED.get(module, ()))) for module, names in there.items()})
    assert done.returncode == 0, done.stderr
    if missing:
        pytest.skip(f"not installed, and so not imported: {', '.join(sorted(missing))}")
