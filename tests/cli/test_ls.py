"""The command `fastckpt` shows what lies in a directory and in memory."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer, StorageType


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("fastckpt")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False)


def test_ls_shows_memory_storage_and_damage(tmp_path: Path) -> None:
    with DdpCheckpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpoint(step, {"w": torch.ones(10)}, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint(60)
        checkpointer.save_checkpoint(3, {"w": torch.ones(10)})
        model = tmp_path / "checkpoint-1" / "model.pt"
        model.write_bytes(model.read_bytes()[:-1])
        shown = run("ls", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    lines = [line.split()[:3] for line in shown.stdout.splitlines()[1:]]
    assert lines[:4] == [["3", "1", "memory"], ["2", "1", "memory"], ["2", "1", "storage"], ["1", "1", "memory"]]
    assert "damaged: " in shown.stdout
    assert "model.pt" in shown.stdout


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    shown = run("ls", str(tmp_path / "none"))
    assert shown.returncode == 2
    assert "none" in shown.stderr
