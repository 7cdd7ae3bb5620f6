"""One training of benchmarks/frequency.py: iterations with and without checkpoints by turns, in one process.

Appends a line of JSON for each iteration to ``--out``: its block, its seconds, and what its checkpoint took.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from examples.ddp_gpt2.model import GPT, GPTConfig
from fastckpt import Checkpointer, DdpCheckpointer, KeepLatestStepStrategy, StorageType, phase
from fastckpt.engine.beats import Beats
from fastckpt.policy.frequency import multiple

PLAIN = "plain"
BLOCK = 30
"""Iterations of a kind in a row, at least."""


class Vgg(nn.Module):
    """Few convolutions, and nearly all parameters in the linear layers behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.linear = nn.Sequential(
            nn.Flatten(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 100)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(self.convolutions(images))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Residual blocks: few parameters, much work."""

    def __init__(self, width: int = 96, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(depth)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        found = self.stem(images)
        for block in self.blocks:
            found = found + block(found)
        return self.head(found.mean((2, 3)))  # type: ignore[no-any-return]


def images_loss(model: nn.Module, batch: int) -> Tensor:
    return functional.cross_entropy(model(torch.randn(batch, 3, 64, 64)), torch.randint(100, (batch,)))


def text_loss(model: nn.Module, batch: int) -> Tensor:
    text = torch.randint(256, (batch, 129))
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor], int]] = {
    "vgg": (Vgg, images_loss, 32),
    "resnet": (ResNet, images_loss, 16),
    "gpt2": (lambda: GPT(GPTConfig(256, 128, 8, 8, 512)), text_loss, 4),
}
"""How to make each, its loss, and the samples in a batch."""


class TorchSave:
    """The checkpoint that training waits for: written and synced, no faster than the storage is."""

    def __init__(self, folder: Path, bytes_per_second: float) -> None:
        self._path, self._rate = folder / "checkpoint.pt", bytes_per_second

    beats = None

    def save(self, step: int, state: dict[str, Any], persist: bool) -> bool:
        start, unfinished = time.monotonic(), self._path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if self._rate:
            time.sleep(max(0.0, unfinished.stat().st_size / self._rate - (time.monotonic() - start)))
        unfinished.rename(self._path)
        return True


class Ours:
    """Persists in the background; with ``overlap``, copies behind training as well."""

    def __init__(self, folder: Path, overlap: torch.optim.Optimizer | None) -> None:
        self._checkpointer = DdpCheckpointer(folder, KeepLatestStepStrategy(2, folder), overlap=overlap)
        self.beats = self._checkpointer._writer.beats

    def save(self, step: int, state: dict[str, Any], persist: bool) -> bool:
        place = StorageType.DISK if persist else StorageType.MEMORY
        return self._checkpointer.save_checkpoint(step, state, storage_type=place).saved


class Training:
    """A model, its optimizer, and the file that says how long each iteration took."""

    def __init__(self, args: argparse.Namespace) -> None:
        make, self._loss, self._batch = MODELS[args.model]
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4, fused=True)
        self._file = os.open(args.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.step = 0

    def iterate(self, block: str, end: Callable[[int], object], beats: Beats | None = None) -> None:
        """One iteration, and the checkpoint at its end; what it stalls is in that, and in waits of the next update."""
        start, waited = time.monotonic(), beats.stalled if beats else 0.0
        self._loss(self.model, self._batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        waited = beats.stalled - waited if beats else 0.0
        work = time.monotonic()
        saved = end(self.step)
        now = time.monotonic()
        line = {"block": block, "seconds": now - start, "stall": now - work + waited, "saved": saved is not None}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def compare(args: argparse.Namespace, training: Training) -> None:
    """Blocks of each kind by turns, each with checkpoints at the same intervals."""
    savers: dict[str, Any] = {
        "torch.save, fsync": TorchSave(args.folder, args.mbps * 1e6),
        "persist in the background": Ours(args.folder / "persist", None),
        "both in the background": Ours(args.folder / "both", training.optimizer),
    }
    memory, storage = args.every
    for _ in range(args.repeats + 1):  # the first is to warm up
        for name, saver in savers.items():
            for step in range(1, multiple(BLOCK, storage) + 1):
                due = step % (memory if saver.beats else storage) == 0
                save = lambda n, s=saver, last=step % storage == 0: s.save(n, training.state(), last)  # noqa: E731
                training.iterate(name, save if due else lambda n: None, saver.beats)
            if saver.beats:
                saver._checkpointer.wait_latest_checkpoint()
            for _ in range(BLOCK // 2):
                training.iterate(PLAIN, lambda n: None)


def follow(args: argparse.Namespace, training: Training) -> None:
    """Checkpoints as often as they may be, or at fixed intervals, with plain iterations in between to compare with."""
    every = {"memory": args.every[0], "storage": args.every[1]} if args.every else "auto"
    with Checkpointer(
        args.folder / "loop", model=training.model, optimizer=training.optimizer, every=every, overhead=args.overhead
    ) as checkpointer:
        checkpointer.resume()
        for done in range(args.iterations):
            training.iterate("checkpoints", lambda n: checkpointer.step(done + 1))  # noqa: B023
            if done % 20 == 19:
                with phase("plain iterations"):
                    for _ in range(10):
                        training.iterate(PLAIN, lambda n: None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--every", type=int, nargs=2, default=None)
    parser.add_argument("--mbps", type=float, default=0.0)
    parser.add_argument("--overhead", type=float, default=0.035)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(args)
    compare(args, training) if args.compare else follow(args, training)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
