"""Arbitrary files in place of images: a state, or an error that resume handles; never a dead process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("FASTCKPT_FUZZ", "400"))
"""Damaged images of each kind, half of them by hypothesis."""
LOADED = {"good", "storage of 2**60 bytes", "storage of 2**72 bytes", "memo of 4 billion", "deep"}
"""The tensor's own part of the storage is there, whatever its size is said to be."""


def state(*, opaque: bool) -> dict[str, Any]:
    """A bit of everything; what is opaque is pickled whole at each save, by torch alone."""
    torch.manual_seed(7)
    weights = torch.randn(5, 7)
    found = {
        "weights": weights, "view": weights[1:3], "half": torch.zeros(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64), "empty": torch.empty(0), "rng": torch.get_rng_state()[:64],
        "step": 7, "names": ["a", None, True, 2.5], "nested": {"a": (1, 2**70), 3: {}}, "bytes": b"abc",
    }  # fmt: skip
    if opaque:
        found |= {"sparse": torch.eye(3).to_sparse(), "parameter": torch.nn.Parameter(torch.ones(2)), "set": {1, 2}}
    return found


def fuzzed(folder: Path, examples: int) -> dict[str, Any]:
    """What became of damaged images, which saves have made, in a process of its own."""
    with DdpCheckpointer(folder / "checkpoints") as checkpointer:
        for step, opaque in enumerate((False, True), 1):
            checkpointer.save_checkpoint(step, state(opaque=opaque), storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint(60)
    good = [str(folder / f"checkpoints/checkpoint-{step}/model.pt") for step in (1, 2)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.images", str(folder), str(examples), *good],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = folder / "last.pt"
    if done.returncode:
        kept = shutil.copy(last, folder / "killer.pt") if last.exists() else "none"
        pytest.fail(f"exit code {done.returncode}, the image is {kept}\n{done.stderr[-5000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"damaged images: {found['found']}")
    return found


def test_damaged_images_load_or_raise_an_error_that_resume_handles(tmp_path: Path):
    found = fuzzed(tmp_path, COUNT // 2)
    assert all(each["loaded"] > 0 and each["UnpicklingError"] > 0 for each in found["found"]), "damage of many kinds"
    assert {name for name, answer in found["crafted"].items() if answer == "loaded"} == LOADED
    assert not found["mark"], "code was run"
    assert found["grown"] < 500e6, "memory was taken because a file said so"
