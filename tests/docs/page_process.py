"""The process that runs the blocks of pages: ``python -m tests.docs.page_process FOLDER PAGE...``.

Blocks of a page share a directory and the names of the preamble below; they run in their order.
"""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastckpt import Checkpointer
from fastckpt._core.in_process_saver import stop_own_saver
from fastckpt.data import ResumableDataLoader
from tests.docs.blocks import ROOT, Block, blocks_of, commands_of, missing

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
RANK["MASTER_PORT"] = "0"
GIVEN = "<!-- given: checkpoints of a job -->"
"""Stands on a page whose commands look at what a job has saved."""
SECONDS = 120
"""For one command."""


def preamble() -> dict[str, Any]:
    """A small training run, as blocks take it for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = torch.randn(48, 8)

    def train(batch: Any) -> torch.Tensor:
        inputs = batch if isinstance(batch, torch.Tensor) else torch.full((4, 8), float(batch))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = count(start=30, step=-1)
    return {
        "torch": torch,
        "dist": dist,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "dataset": dataset,
        "loader": ResumableDataLoader(dataset, batch_size=8, shuffle=True),
        "train": train,
        "validate": lambda *_: float(next(losses)),
        "epochs": 1,
        "max_steps": 4,
        "__name__": "__main__",
    }


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run it as the only rank of a job."""
    padded = "\n" * block.line + block.code  # so that a traceback has the line of the page
    os.environ |= RANK
    try:
        exec(compile(padded, block.page, "exec"), names)
    finally:
        for name in RANK:
            del os.environ[name]
    stop_own_saver()  # as at the end of a script: what follows finds its checkpoints on storage
    if dist.is_initialized():
        dist.destroy_process_group()


def run_shell(block: Block) -> None:
    for command in commands_of(block):
        done = subprocess.run(
            ["bash", "-e", "-c", command.line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        print(f"$ {command.line}\n{done.stdout}", flush=True)
        assert done.returncode == 0, f"{block.place}: {command.line!r} ended with {done.returncode}"
        lost = missing(command.shown, done.stdout.replace(str(Path.cwd()), "/data"))
        assert not lost, f"{block.place}: {command.line!r} did not print {lost}"


def save_some() -> None:
    """The checkpoints that a page takes for granted: of a job with a larger model, in ``checkpoints``."""
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer("checkpoints", model=model, optimizer=optimizer, every=1) as checkpointer:
        checkpointer.resume()
        for step in (1, 2, 3):
            model(torch.ones(256)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
    stop_own_saver()


def main(page: str) -> None:
    names = preamble()
    if GIVEN in (ROOT / page).read_text():
        save_some()
    for block in blocks_of(page):
        if block.runs_in or block.not_run:
            continue
        print(f"--- {block.place} ({block.kind})", flush=True)
        if block.file:
            Path(block.file).write_text(block.code)
        elif block.kind in ("python", "diff"):
            run_python(block, names)
        else:
            run_shell(block)


if __name__ == "__main__":
    for number, each in enumerate(sys.argv[2:]):
        place = Path(sys.argv[1], str(number))
        place.mkdir(parents=True)
        os.chdir(place)
        main(each)
