"""The commands on checkpoints whose files and directories a framework has named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastckpt._core.native.folder_checkpointer import (
    CheckpointNames,
    FolderCheckpointer,
    Raw,
    RequiredFiles,
    StorageType,
    Tensors,
)
from tests.cli import harm

WEIGHTS = "model/model.safetensors"


@pytest.fixture
def run(directory) -> Path:
    """Steps 1 to 3: ``first``, ``best``, and ``checkpoint-3``."""
    with FolderCheckpointer(directory, RequiredFiles("optimizer.bin", "rank_0.pt")) as checkpointer:
        for step, name in enumerate(("first", "best", ""), 1):
            weights = {"w": torch.full((3, 2), float(step)), "none": torch.empty(0, 4, dtype=torch.bfloat16)}
            files = {
                "optimizer.bin": {"steps": step, "moment": torch.arange(6.0)},
                WEIGHTS: Tensors(weights, {"format": "pt"}),
                "config.json": Raw(json.dumps({"layers": [2, 4]}).encode(), may_end_with_spaces=True),
                "notes": Raw(b"step %d" % step),
                "rank_0.pt": {"epoch": 1},
            }
            checkpointer.save_checkpoint(step, files, StorageType.DISK, named=CheckpointNames(name, "latest"))
            checkpointer.wait_latest_checkpoint()
    return directory


def test_commands_read_checkpoints_of_frameworks(fastckpt, run, tmp_path):
    said = fastckpt("which", run, "--verify", "--json")
    assert said.code == 0 and said.document["choice"]["step"] == 3
    assert fastckpt("verify", run, "--json").code == 0

    files = {file["name"]: file for file in fastckpt("show", f"{run}@2", "--json").document["files"]}
    assert files.keys() == {"optimizer.bin", WEIGHTS, "config.json", "notes", "rank_0.pt"}
    entries = {entry["name"]: entry for entry in files[WEIGHTS]["entries"]}
    assert (entries["w"]["type"], entries["w"]["shape"], entries["w"]["bytes"]) == ("float32", [3, 2], 24)
    assert (entries["none"]["type"], entries["none"]["shape"]) == ("bfloat16", [0, 4])
    assert entries["__metadata__.format"]["value"] == "pt"
    assert [e["value"] for e in files["config.json"]["entries"] if e["kind"] == "value"] == [2, 4]
    assert files["notes"]["tensors"] == 0 and files["notes"]["size"] == 6
    assert f"{run}/best/notes: 6 B" in fastckpt("show", f"{run}@2").out

    said = fastckpt("diff", f"{run}@2", f"{run}@3", "--json")
    files = {file["name"]: file for file in said.document["files"]}
    assert said.code == 1
    assert {name for name, file in files.items() if file["equal"]} == {"config.json", "rank_0.pt"}
    [weights] = files[WEIGHTS]["tensors"]
    assert (weights["name"], weights["differing"], weights["max_abs"]) == ("w", 6, 1.0)
    [notes] = files["notes"]["changes"]
    assert notes["a"] != notes["b"]
    assert fastckpt("diff", f"{run}@2", f"{run}@2").code == 0

    said = fastckpt("export", f"{run}@2", tmp_path / "x.safetensors")
    assert said.code == 2 and "optimizer.bin" in said.err, "it names what there is"
    assert fastckpt("export", f"{run}@2", tmp_path / "x.safetensors", "--file", "optimizer.bin").code == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["moment"], torch.arange(6.0))

    harm.flip(run / "checkpoint-3" / WEIGHTS)
    assert fastckpt("which", run, "--verify", "--json").document["choice"]["path"] == str(run / "best")
    said = fastckpt("verify", run)
    assert said.code == 1 and WEIGHTS in said.out
    items = fastckpt("ls", run, "--json").document["checkpoints"]
    assert [item["path"] for item in items] == [str(run / name) for name in ("checkpoint-3", "best", "first")]
    assert fastckpt("prune", run, "--keep-last", "2", "--yes").code == 0
    assert {path.name for path in run.glob("*/")} == {".fastckpt", "best", "checkpoint-3"}
