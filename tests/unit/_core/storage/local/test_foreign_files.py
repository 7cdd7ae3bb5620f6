"""Checkpoints of other tools, recognized by their names and first bytes; other files are not."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fastckpt._core.storage.local import foreign_files as f
from fastckpt._core.storage.local.foreign_files import foreign
from fastckpt._core.storage.local.layout import TRACKER

STATE = {"model": {"w": torch.ones(3)}, "step": 100}
LIGHTNING = STATE | {"pytorch-lightning_version": "2.5"}


def write(path: Path, content: Any = None) -> None:
    """A file of JSON, or one of torch, of the old format if its name ends so; or the directory of a sharded state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.write_text("{}")
    elif content == "sharded":
        dcp.save({"w": torch.ones(3)}, checkpoint_id=str(path), no_dist=True)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=path.suffix != ".pth")


@pytest.mark.parametrize(
    ("writer", "where", "files"),
    [
        (f.FLASH, "100", {"100/rank_0.pt": STATE, "dlrover_latest.txt": None}),
        (f.DCP, "step-7", {"step-7": "sharded"}),
        (f.TORCH, "last.pt", {"last.pt": STATE}),
        (f.TORCH, "model.pth", {"model.pth": STATE}),
        (f.TORCH, "epoch_3/net.pt", {"epoch_3/net.pt": torch.nn.Linear(2, 2)}),
        (f.LIGHTNING, "epoch=0-step=10.ckpt", {"epoch=0-step=10.ckpt": LIGHTNING}),
        (f.DEEPSPEED, "global_step5", {"global_step5/mp_rank_00_model_states.pt": STATE, "latest": None}),
        (f.TRAINER, "checkpoint-5", {"checkpoint-5/optimizer.pt": STATE, "checkpoint-5/trainer_state.json": None}),
        (f.ACCELERATE, ".", {"optimizer.bin": STATE, "random_states_0.pkl": None}),
        (f.MEGATRON, "iter_010", {"iter_010/mp_rank_00/model_optim_rng.pt": STATE, TRACKER: None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_checkpoints_of_other_tools_are_recognized(tmp_path: Path, writer: str, where: str, files: dict[str, Any]):
    for name, content in files.items():
        write(tmp_path / name, content)
    assert foreign(tmp_path) == [(tmp_path / where, writer)]


def test_files_that_are_no_checkpoints_are_not_recognized_as_such(tmp_path: Path):
    for name in ("train.log", "config.json", "events.out.tfevents.1.host", "runs/version_0/hparams.yaml", "latest",
                 TRACKER, "checkpoint-3/notes.txt", ".fastckpt/writers", "data.tar",
                 "empty.pt", "model.safetensors", "tokenizer-2/tokenizer.json"):  # fmt: skip
        write(tmp_path / name)
    write(tmp_path / "images.pt", torch.ones(10))
    write(tmp_path / "pairs.pt", [torch.ones(2), torch.ones(2)])
    write(tmp_path / "settings.pt", {"lr": 0.1, "steps": [1, 2]})
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": 1}))
    assert foreign(tmp_path) == []
    assert foreign(tmp_path / "absent") == []
