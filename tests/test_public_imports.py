"""Imports that users have written keep working wherever the code behind them goes, without what extras bring."""

import importlib
import subprocess
import sys

import pytest

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
}  # fmt: skip
FRAMEWORKS = {"fastckpt.accelerate", "fastckpt.deepspeed", "fastckpt.huggingface", "fastckpt.lightning"}
OF_EXTRAS = "accelerate deepspeed lightning peft pynvml s3fs safetensors tensorboard torchdata transformers"
"""Modules that extras bring, which are hidden; `make extras` imports each framework where its own extra is alone."""
PROGRAM = """
import os, sys, traceback
import torch.distributed.checkpoint, torch.distributed.fsdp

sys.modules |= dict.fromkeys(sys.argv[1].split())
codes = []
for statement in sys.argv[2:]:
    if not (pid := os.fork()):
        try:
            exec(statement)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    codes.append(os.waitpid(pid, 0)[1])
sys.exit(any(codes))
"""
"""Each statement is run in a process of its own, which is forked from one that has imported torch alone."""


def test_public_imports_of_earlier_versions_work() -> None:
    others = IMPORTS.keys() - FRAMEWORKS
    statements = [
        f"from {each} import {', '.join(IMPORTS[each])}" if IMPORTS[each] else f"import {each}" for each in others
    ]
    command = [sys.executable, "-c", PROGRAM, OF_EXTRAS, *statements]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.frameworks
def test_public_imports_of_frameworks_work() -> None:
    for module in FRAMEWORKS:
        assert not {name for name in IMPORTS[module] if not hasattr(importlib.import_module(module), name)}
