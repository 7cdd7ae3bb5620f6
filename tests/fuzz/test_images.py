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
COUNT = int(os.environ.get("FASTCKPT_FUZZ", "800"))
"""Damaged images, half of them by hypothesis."""
LOADED = {"good", "storage of 2**60 bytes", "storage of 2**72 bytes", "deep"}
"""The tensor's own part of the storage is there, whatever its size is said to be."""


def state(*, opaque: bool) -> dict[str, Any]:
    """A bit of everything; what is opaque is pickled whole at each save, by torch alone."""
    weights = torch.randn(5, 7)
    found = {
        "weights": weights, "view": weights[1:3], "half": torch.zeros(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64), "empty": torch.empty(0), "rng": torch.get_rng_state()[:64],
        "step": 7, "names": ["a", None, True, 2.5], "nested": {"a": (1, 2**70), 3: {}}, "bytes": b"abc",
    }  # fmt: skip
    if opaque:
        found |= {"sparse": torch.eye(3).to_sparse(), "parameter": torch.nn.Parameter(torch.ones(2)), "set": {1, 2}}
    return found


def fuzzed(folder: Path, examples: int, **options: Any) -> dict[str, Any]:
    """What became of damaged images, which a save has made, in a process of its own."""
    with DdpCheckpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save_checkpoint(1, state(**options), storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint(60)
    good = folder / "checkpoints/checkpoint-1/model.pt"
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.images", str(good), str(folder), str(examples)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = folder / "last.pt"
    if done.returncode:
        kept = shutil.copy(last, folder / "killer.pt") if last.exists() else "none"
        pytest.fail(f"exit code {done.returncode}, the image is {kept}\n{done.stderr[-5000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"{sum(found['found'].values())} damaged images: {found['found']}")
    return found


@pytest.mark.parametrize("opaque", [False, True])
def test_damaged_images_load_or_raise_an_error_that_resume_handles(tmp_path: Path, opaque: bool):
    found = fuzzed(tmp_path, COUNT // 2, opaque=opaque)
    assert found["found"]["loaded"] > 0 and found["found"]["UnpicklingError"] > 0, "damage of many kinds"
    assert {name for name, answer in found["crafted"].items() if answer == "loaded"} == LOADED
    assert not found["mark"], "code was run"
    assert found["grown"] < 500e6, "memory was taken because a file said so"
