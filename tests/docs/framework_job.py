"""A job of one worker that runs the blocks of docs/guides/adopt.md for frameworks, each in a directory of its own."""

import os
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from fastckpt.data import ResumableDataLoader
from tests.docs.blocks import blocks_of
from tests.e2e.deepspeed import gloo  # noqa: F401 (for what it does)

CODE = {
    word: block.code
    for block in blocks_of("docs/guides/adopt.md")
    for word in ("deepspeed", "huggingface", "lightning", "accelerate")
    if f"from fastckpt.{word} import" in block.code and block.runs_in
}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((4,), number)
        return {"input_ids": tokens, "labels": tokens}


def of_deepspeed() -> dict[str, Any]:
    model = nn.Linear(8, 1)
    zero = {"stage": 2, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": adam, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return {"engine": engine, "batches": cycle(torch.randn(4, 4, 8))}


def of_huggingface() -> dict[str, Any]:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    common = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments("checkpoints", max_steps=10, save_steps=5, per_device_train_batch_size=2, **common)
    return {"model": model, "training_args": arguments, "dataset": Tokens()}


def of_lightning() -> dict[str, Any]:
    return {"os": os, "module": Module(), "loader": ResumableDataLoader(torch.randn(40, 8), batch_size=2, shuffle=True)}


def of_accelerate() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return {"accelerator": accelerator, "model": model, "optimizer": optimizer, "batches": cycle(torch.randn(4, 4, 8))}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    given = {
        "deepspeed": of_deepspeed,
        "accelerate": of_accelerate,
        "huggingface": of_huggingface,
        "lightning": of_lightning,
    }
    for name, prepare in given.items():
        (folder / name).mkdir(exist_ok=True)
        os.chdir(folder / name)
        exec(compile(CODE[name], f"docs/guides/adopt.md, {name}", "exec"), prepare())
        print(f"{name} is done", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
