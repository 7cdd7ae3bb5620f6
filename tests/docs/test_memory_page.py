"""The formula of docs/guides/memory.md against what shared memory a job takes, and what `fastckpt plan` says."""

import json
import os
import re
from pathlib import Path

import torch
from click.testing import CliRunner

from fastckpt import DdpCheckpointer, StorageType
from fastckpt_run.cli import main

PAGE = Path(__file__).parents[2] / "docs/guides/memory.md"
PAGE_SIZE = 4096


def taken(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_the_formula_of_the_page_is_what_a_job_takes_and_the_command_plans(tmp_path: Path):
    directory, shm = tmp_path / "checkpoints", Path(os.environ["FASTCKPT_SHM_DIR"])
    formula = PAGE.read_text()
    assert "4 KiB x (2 + ranks of the node)" in formula and "3 x slot, + 4 KiB x (4 + ranks of the node)" in formula
    weights = torch.randn(500_000)
    state = {
        "model": {"weights": weights},
        "optimizer": {"m": torch.zeros_like(weights), "v": torch.ones_like(weights)},
    }
    with DdpCheckpointer(directory) as checkpointer:
        for step in range(1, 7):
            assert checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint(60)
        sizes = [path.stat().st_size for path in (directory / "checkpoint-6").glob("*.pt")]
        slot = sum(sizes) + PAGE_SIZE * (2 + 1)
        expected = 3 * slot + PAGE_SIZE * (4 + 1)
        in_memory = taken(shm)
    planned = json.loads(CliRunner().invoke(main, ["plan", str(directory), "--json"]).stdout)["memory"]
    assert (planned["slot"], planned["arena"]) == (slot, expected)
    assert expected - 64 * 1024 <= in_memory <= expected, "whole slots; of records, those that were written"


def test_the_worked_example_of_the_page_is_the_formula():
    text = PAGE.read_text()
    assert 7 * 12 == 84 and 7 * 10 == 70 and 84 / 8 == 10.5 and 70 / 8 == 8.75
    for number in (3 * 84, 3 * 70, 3 * 84 // 2, 3 * 70 // 2):
        assert re.search(rf"\b{number} GB", text), number
