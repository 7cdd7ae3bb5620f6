"""`fastckpt ls`: checkpoints of a directory on storage and in memory."""

import os
import time
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer, StorageType
from tests.cli import harm
from tests.cli.conftest import publish


def test_ls_lists_checkpoints_in_memory_and_on_storage(fastckpt, directory):
    with DdpCheckpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpoint(step, {"w": torch.ones(10)}, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint(60)
        checkpointer.save_checkpoint(3, {"w": torch.ones(10)}, storage_type=StorageType.MEMORY)
        harm.lengthen(directory / "checkpoint-1/model.pt")
        document = fastckpt("ls", directory, "--json").document
        shown = fastckpt("ls", directory)
    assert all(0 <= item["age"] < 60 and abs(item["time"] - time.time()) < 60 for item in document["checkpoints"])
    rows = [(item["step"], item["tier"]) for item in document["checkpoints"]]
    assert rows == [(3, "memory"), (2, "memory"), (2, "storage"), (1, "memory"), (1, "storage")]
    assert [item["state"] for item in document["checkpoints"]] == ["whole"] * 4 + ["damaged"]
    [job] = document["jobs"]
    assert (job["pid"], bool(job["host"] and job["started"])) == (os.getpid(), True)
    assert Path(job["arena"]).name.startswith("fastckpt-")
    assert shown.code == 0 and not shown.err
    assert f"damaged: {directory / 'checkpoint-1'}: " in shown.out and "in use by process" in shown.out


def test_ls_names_checkpoints_of_other_tools_and_a_missing_directory(fastckpt, directory):
    said = fastckpt("ls", directory)
    assert said.code == 2 and str(directory) in said.err and not said.out
    directory.mkdir()
    assert fastckpt("ls", directory).out.splitlines()[1:] == ["no checkpoint of fastckpt is here"]
    torch.save({"w": torch.ones(2)}, directory / "last.pt")
    said = f"{directory}/last.pt seems to be of torch.save"
    for command in ("ls", "which"):
        assert fastckpt(command, directory).out.endswith(f"{said}: show, diff and export read it\n"), command
    assert f"{directory} has no checkpoint of fastckpt to check; {said}" in fastckpt("verify", directory).err


def test_a_checkpoint_without_the_files_of_a_rank_does_not_count(fastckpt, three):
    publish(three, 40, world_size=2)
    publish(three, 15, history=2)
    why = "not for all of 2 ranks: rank_1.pt missing"
    [newest, half, *others] = fastckpt("ls", three, "--json").document["checkpoints"]
    assert (half["step"], half["state"], half["whole"], half["why"]) == (40, "incomplete", False, why)
    assert [(item["history"], item["step"]) for item in (newest, *others)] == [(2, 15), (1, 30), (1, 20), (1, 10)]
    assert all(item["whole"] for item in (newest, *others))
    said = fastckpt("verify", three)
    assert said.code == 1 and why in said.out
    assert fastckpt("which", three, "--json").document["choice"]["step"] == 15
    fastckpt("prune", three, "--keep-last", 1, "--yes")
    assert {path.name for path in three.glob("checkpoint-*")} == {"checkpoint-15", "checkpoint-30", "checkpoint-40"}
