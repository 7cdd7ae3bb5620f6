"""A job that the benchmark ettr kills: its steps take a fixed time, most of which stands for a device's.

It appends a line of JSON to ``<out>/stamps`` when the script begins, when it has resumed, and for each step.
"""

# ruff: noqa: E402
import json
import os
import sys
import time

OUT = sys.argv[sys.argv.index("--out") + 1]


def stamp(what: str, step: int = 0) -> None:
    line = {"what": what, "step": step, "pid": os.getpid(), "at": time.monotonic()}
    file = os.open(f"{OUT}/stamps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)


stamp("script")  # before the imports, so that a kill in the middle of them strikes

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastckpt import Checkpointer

WIDTH = 512


class Wait(torch.autograd.Function):
    """The time that a device would take for a layer: a third of it forward, two backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return gradients[0], None


class Layer(nn.Linear):
    """A layer that takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wait.apply(super().forward(x), self.seconds)


class TorchSave:
    """Saves as scripts for torchrun do: write a file every so many steps, and rename it."""

    def __init__(self, folder: Path, every: int, parts: dict[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        self._path, self._every, self._parts = folder / "checkpoint.pt", every, parts

    def resume(self) -> int:
        if not self._path.exists():
            return 0
        state = torch.load(self._path)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        return int(state["step"])

    def step(self, step: int) -> None:
        if step % self._every == 0:
            state = {name: part.state_dict() for name, part in self._parts.items()}
            torch.save(state | {"step": step}, self._path.with_suffix(".tmp"))
            self._path.with_suffix(".tmp").replace(self._path)


def saver(args: argparse.Namespace, parts: dict[str, Any]) -> Any:
    if args.every:
        return TorchSave(args.out / "checkpoints", args.every, parts)
    return Checkpointer(args.out / "checkpoints", **parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=0, help="steps between torch.save; 0: fastckpt, by its defaults")
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = max(1, round(args.megabytes * 1e6 / (12 * WIDTH * WIDTH)))
    model = nn.Sequential(*(Layer(0.8 * args.step_seconds / layers) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    checkpointer = saver(args, {"model": model, "optimizer": optimizer})
    step = checkpointer.resume()
    stamp("resumed", step)
    while True:
        begun = time.monotonic()
        step += 1
        model(torch.ones(1, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, begun + args.step_seconds - time.monotonic()))  # without saves all steps take equally long
        checkpointer.step(step)
        stamp("step", step)


if __name__ == "__main__":
    main()
