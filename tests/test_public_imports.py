"""Imports that users have written, and that keep working wherever the code behind them goes."""

import importlib.util
import json
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
}  # fmt: skip
NEEDS = {"fastckpt.accelerate": "accelerate", "fastckpt.deepspeed": "deepspeed", "fastckpt.huggingface": "transformers"}
NEEDS |= {"fastckpt.lightning": "lightning"}


FORKED = """
import json, os, sys, traceback
import torch
failed = []
for module, names in json.loads(sys.argv[1]).items():
    if not (pid := os.fork()):
        try:
            exec(f"from {module} import {', '.join(names)}")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        failed.append(module)
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
"""
"""Import each in a process of its own, forked from one that has imported torch; name the modules that fail."""


def test_public_imports_of_earlier_versions_work() -> None:
    missing = {module for module, needed in NEEDS.items() if importlib.util.find_spec(needed) is None}
    there = {module: names for module, names in IMPORTS.items() if module not in missing}
    command = [sys.executable, "-c", FORKED, json.dumps(there)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    if missing:
        pytest.skip(f"not installed, and so not imported: {', '.join(sorted(missing))}")
