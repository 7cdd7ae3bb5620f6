"""The blocks of docs/guides/adopt.md for frameworks train, and what they save is on storage."""

import importlib
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt.data import ResumableDataLoader
from tests.docs.blocks import blocks_of
from tests.e2e.accelerate.test_checkpointer import fresh_accelerator_state  # noqa: F401 (a fixture)
from tests.e2e.deepspeed.conftest import process_group  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("process_group")]


def of_deepspeed(engines: Any) -> dict[str, Any]:
    return {"engine": engines.engine_of(nn.Linear(8, 1), engines.config(2)), "batches": cycle(torch.randn(4, 4, 8))}


def of_huggingface(stock: Any) -> dict[str, Any]:
    args = stock.parse_arguments("--out", ".", "--checkpoint-dir", "checkpoints", "--steps", "10", "--disk", "5")
    arguments = stock.training_arguments(args)
    return {"model": stock.make_model("ddp"), "training_args": arguments, "dataset": stock.Sentences(5, 88)}


def of_lightning(training: Any) -> dict[str, Any]:
    loader = ResumableDataLoader(training.samples(64), 4, shuffle=True)
    return {"os": importlib.import_module("os"), "module": training.Module("unseeded"), "loader": loader}


def of_accelerate(training: Any) -> dict[str, Any]:
    accelerator = training.Accelerator(cpu=True)
    model = nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return {"accelerator": accelerator, "model": model, "optimizer": optimizer, "batches": cycle(torch.randn(4, 4, 8))}


@pytest.mark.parametrize(
    ("prepare", "helpers", "found"),
    [
        (of_deepspeed, "deepspeed.engines", "global_step10/manifest.json"),
        (of_huggingface, "huggingface.stock", "checkpoint-10/manifest.json"),
        (of_lightning, "lightning.training", "*step=10*.ckpt"),
        (of_accelerate, "accelerate.training", "checkpoint-10/manifest.json"),
    ],
)
def test_the_block_of_a_framework_trains_and_its_last_step_is_on_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any, helpers: str, found: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    imported = f"from fastckpt.{helpers.partition('.')[0]} import"
    [block] = [block for block in blocks_of("docs/guides/adopt.md") if imported in block.code and block.runs_in]
    exec(
        compile("\n" * block.line + block.code, block.page, "exec"),
        prepare(importlib.import_module(f"tests.e2e.{helpers}")),
    )
    assert [*(tmp_path / "checkpoints").glob(found)]
