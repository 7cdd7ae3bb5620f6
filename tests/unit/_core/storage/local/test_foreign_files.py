"""Checkpoints of other tools, recognized by their names and first bytes; other files are not."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fastckpt._core.storage.local import foreign_files as f
from fastckpt._core.storage.local.foreign_files import foreign

STATE = {"model": {"w": torch.ones(3)}, "step": 100}


def save(path: Path, state: Any = STATE, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path, **options)


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def flash(d: Path) -> Path:
    save(d / "100/rank_0.pt")
    touch(d / "dlrover_latest.txt")
    return d / "100"


def sharded(d: Path) -> Path:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=str(d / "step-7"), no_dist=True)
    return d / "step-7"


def sharded_here(d: Path) -> Path:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=str(d), no_dist=True)
    return d


def a_file(d: Path) -> Path:
    save(d / "last.pt")
    return d / "last.pt"


def an_old_file(d: Path) -> Path:
    save(d / "model.pth", _use_new_zipfile_serialization=False)
    return d / "model.pth"


def an_object(d: Path) -> Path:
    save(d / "epoch_3/net.pt", torch.nn.Linear(2, 2))
    return d / "epoch_3/net.pt"


def lightning(d: Path) -> Path:
    save(d / "epoch=0-step=10.ckpt", STATE | {"pytorch-lightning_version": "2.5"})
    return d / "epoch=0-step=10.ckpt"


def deepspeed(d: Path) -> Path:
    save(d / "global_step5/mp_rank_00_model_states.pt")
    touch(d / "latest")
    return d / "global_step5"


def trainer(d: Path) -> Path:
    save(d / "checkpoint-500/optimizer.pt")
    touch(d / "checkpoint-500/trainer_state.json")
    return d / "checkpoint-500"


def accelerate(d: Path) -> Path:
    save(d / "optimizer.bin")
    touch(d / "random_states_0.pkl")
    return d


def megatron(d: Path) -> Path:
    save(d / "iter_0000100/mp_rank_00/model_optim_rng.pt")
    touch(d / "latest_checkpointed_iteration.txt")
    return d / "iter_0000100"


@pytest.mark.parametrize(
    ("write", "writer"),
    [
        (flash, f.FLASH), (sharded, f.DCP), (sharded_here, f.DCP), (a_file, f.TORCH), (an_old_file, f.TORCH),
        (an_object, f.TORCH), (lightning, f.LIGHTNING), (deepspeed, f.DEEPSPEED), (trainer, f.TRAINER),
        (accelerate, f.ACCELERATE), (megatron, f.MEGATRON),
    ],
)  # fmt: skip
def test_checkpoints_of_other_tools_are_recognized(tmp_path: Path, write: Any, writer: str):
    where = write(tmp_path)
    assert foreign(tmp_path) == [(where, writer)]


def test_files_that_are_no_checkpoints_are_not_recognized_as_such(tmp_path: Path):
    for name in ("train.log", "config.json", "events.out.tfevents.1.host", "runs/version_0/hparams.yaml", "latest",
                 "latest_checkpointed_iteration.txt", "checkpoint-3/notes.txt", ".fastckpt/writers", "data.tar",
                 "empty.pt", "model.safetensors", "tokenizer-2/tokenizer.json"):  # fmt: skip
        touch(tmp_path / name)
    save(tmp_path / "images.pt", torch.ones(10))
    save(tmp_path / "pairs.pt", [torch.ones(2), torch.ones(2)])
    save(tmp_path / "settings.pt", {"lr": 0.1, "steps": [1, 2]})
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": 1}))
    assert foreign(tmp_path) == []
    assert foreign(tmp_path / "absent") == []
