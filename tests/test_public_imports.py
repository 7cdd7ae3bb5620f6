"""Imports that users have written keep working wherever the code behind them goes, without what extras bring."""

import importlib

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
FRAMEWORKS = {"fastckpt.accelerate", "fastckpt.deepspeed", "fastckpt.huggingface", "fastckpt.lightning"}
ALONE = {"torch.utils.tensorboard": {"tensorboard"}}
OF_EXTRAS = {"accelerate", "deepspeed", "lightning", "safetensors", "transformers"}
OF_EXTRAS |= {"peft", "pynvml", "s3fs", "tensorboard", "torchdata"}
"""Modules that extras bring, which are hidden; `make extras` imports each framework where its own extra is alone."""


def test_public_imports_of_earlier_versions_work() -> None:
    others = {each: (names, OF_EXTRAS - ALONE.get(each, set())) for each, names in IMPORTS.items()}
    done = run_imports({module: each for module, each in others.items() if module not in FRAMEWORKS})
    assert done.returncode == 0, done.stderr


@pytest.mark.frameworks
def test_public_imports_of_frameworks_work() -> None:
    for module in FRAMEWORKS:
        assert not {name for name in IMPORTS[module] if not hasattr(importlib.import_module(module), name)}
