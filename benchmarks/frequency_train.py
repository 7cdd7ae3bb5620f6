"""One training of benchmarks/frequency.py: blocks of iterations with and without checkpoints by turns, in one process.

Appends a line of JSON for each iteration to ``--out``: its block and what that is, its seconds, and what its checkpoint
took. An iteration begins with the checkpoint of the step before, so that all that this costs is in it and the next.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt2.model import GPT, GPTConfig
from fastckpt import Checkpointer, DdpCheckpointer, KeepLatestStepStrategy, StorageType, phase
from fastckpt._core.client.heartbeat import Heartbeat
from fastckpt._core.policy.frequency.intervals import multiple
from fastckpt.data import ResumableSampler

PLAIN, LEAD = "plain", "lead"
BLOCK = 8
"""Iterations of a kind in a row, at least."""
LEADING = 2
"""Iterations before them that do not count: what was before may still have an effect."""
WARM_UP = 4
"""Iterations in which each way takes what memory it needs."""


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


class Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.work = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        around = (nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.around = nn.Sequential(*around if channels != width else ())

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.work(images) + self.around(images))


class ResNet(nn.Sequential):
    """ResNet-18 (He et al., 2016) without its last and largest stage: little state, much work."""

    def __init__(self) -> None:
        stem = (nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        shapes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        blocks = [Residual(*shape) for shape in shapes]
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))


def images_loss(model: nn.Module, batch: int) -> Tensor:
    return functional.cross_entropy(model(torch.randn(batch, 3, 64, 64)), torch.randint(100, (batch,)))


def text_loss(model: nn.Module, batch: int) -> Tensor:
    text = torch.randint(256, (batch, 129))
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor], int]] = {
    "resnet": (ResNet, images_loss, 16),
    "gpt2": (lambda: GPT(GPTConfig(256, 128, 8, 8, 512)), text_loss, 3),
    "gpt2-wide": (lambda: GPT(GPTConfig(256, 128, 6, 12, 768)), text_loss, 2),
    "vgg": (Vgg, images_loss, 32),
}
"""Constructor, loss and batch size of each; from the least state per second of work to the most."""


class Way(Protocol):
    """A way to save.

    Attributes:
        beats: Says how long training has stalled, if the way has a part of training that waits later.
    """

    beats: Heartbeat | None

    def begin(self, step: int) -> bool:
        """This step is done: save it if a checkpoint is due; whether one was."""
        ...

    def settle(self) -> None:
        """Wait until nothing is under way."""
        ...


class Nothing:
    """Makes no checkpoint."""

    beats = None

    def begin(self, step: int) -> bool:
        return False

    def settle(self) -> None:
        pass


class TorchSave:
    """The checkpoint that training waits for: written and synced, no faster than the storage is."""

    beats = None

    def __init__(self, training: "Training", args: argparse.Namespace) -> None:
        self._training, self._every, self._rate = training, args.every[1], args.mbps * 1e6
        self._path = args.folder / "checkpoint.pt"

    def begin(self, step: int) -> bool:
        if step % self._every:
            return False
        start, unfinished = time.monotonic(), self._path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            torch.save(self._training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        if self._rate:
            time.sleep(max(0.0, unfinished.stat().st_size / self._rate - (time.monotonic() - start)))
        unfinished.rename(self._path)
        return True

    def settle(self) -> None:
        pass


class PersistBehind:
    """A copy that training waits for, and a persist behind it."""

    def __init__(self, training: "Training", args: argparse.Namespace) -> None:
        folder = args.folder / "persist"
        self._training, (self._memory, self._storage) = training, args.every
        self._checkpointer = DdpCheckpointer(folder, KeepLatestStepStrategy(2, folder))
        self._checkpointer.prepare(training.state(), training.optimizer)
        self.beats: Heartbeat | None = self._checkpointer._writer.beats
        self.settle = self._checkpointer.wait_latest_checkpoint

    def begin(self, step: int) -> bool:
        if step % self._memory:
            return False
        place = StorageType.MEMORY if step % self._storage else StorageType.DISK
        return self._checkpointer.save_checkpoint(step, self._training.state(), storage_type=place).saved


class BothBehind:
    """`fastckpt.Checkpointer`: copies and persists overlap with training."""

    def __init__(self, training: "Training", args: argparse.Namespace) -> None:
        every = {"memory": args.every[0], "storage": args.every[1]} if args.every else "auto"
        self._data = ResumableSampler(range(args.epoch))
        self._checkpointer = Checkpointer(
            args.folder / "both", model=training.model, optimizer=training.optimizer, data=self._data, every=every,
            overhead=args.overhead,
        )  # fmt: skip
        self._checkpointer.resume()
        self.beats: Heartbeat | None = self._checkpointer._writer.beats

    def begin(self, step: int) -> bool:
        result = self._checkpointer.step(step)
        return result is not None and result.saved

    def settle(self) -> None:
        self._checkpointer._checkpointer.wait_latest_checkpoint()

    @property
    def persisting(self) -> bool:
        """Return whether a persist is under way."""
        status = self._checkpointer._writer.glance()
        return status is not None and status.waiting > 0


class Training:
    """A model, its optimizer, and the file that says how long each iteration took."""

    def __init__(self, args: argparse.Namespace) -> None:
        make, self._loss, self._batch = MODELS[args.model]
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4, fused=True)
        self._file = os.open(args.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._blocks = count()

    def block(self, kind: str, way: Way, steps: Iterator[int]) -> None:
        """Iterations in a row, after each of these steps; each is a line."""
        number = next(self._blocks)
        for step in steps:
            start = time.monotonic()
            saved = way.begin(step)
            stall, waited = time.monotonic() - start, way.beats.stalled if way.beats else 0.0
            self._loss(self.model, self._batch).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            stall += way.beats.stalled - waited if way.beats else 0.0
            line = {"block": number, "kind": kind, "saved": saved, "stall": stall, "seconds": time.monotonic() - start}
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def plain(self, iterations: int) -> None:
        """Iterations without checkpoints."""
        with phase("plain iterations"):
            self.block(LEAD, Nothing(), iter(range(LEADING)))
            self.block(PLAIN, Nothing(), iter(range(iterations)))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def compare(args: argparse.Namespace, training: Training) -> None:
    """Blocks of each way by turns, at the same intervals, each as long as whole intervals are."""
    both, storage = BothBehind(training, args), args.every[1]
    others: dict[str, Way] = {
        "torch.save, fsync": TorchSave(training, args),
        "persist in the background": PersistBehind(training, args),
    }
    length, step = multiple(BLOCK, storage), storage

    def block(kind: str, way: Way, iterations: int) -> None:
        nonlocal step
        training.block(kind, way, iter(range(step, step + iterations)))
        step += multiple(iterations, storage)
        way.settle()

    for way in (both, *others.values()):
        block(LEAD, way, WARM_UP)
    training.plain(length)
    end = time.monotonic() + args.seconds
    for number in count():
        for name, way in others.items() if number < args.repeats else ():
            block(name, way, length)
            training.plain(length)
        block("both in the background", both, length)
        training.plain(length)
        if number >= args.repeats and time.monotonic() > end:
            break


def follow(args: argparse.Namespace, training: Training) -> None:
    """Checkpoints as often as they may be, or at fixed intervals; with plain iterations in between, if any."""
    way, done, end = BothBehind(training, args), 0, time.monotonic() + args.seconds

    def steps() -> Iterator[int]:
        nonlocal done
        first = done
        while done - first < 2 * BLOCK or (args.plain and way.persisting and done - first < 6 * BLOCK):
            yield (done := done + 1)

    training.block(LEAD, Nothing(), iter(range(LEADING)))
    while time.monotonic() < end or done < args.iterations:
        training.block("checkpoints", way, steps())
        if args.plain:
            way.settle()
            training.plain(BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--every", type=int, nargs=2, default=None)
    parser.add_argument("--mbps", type=float, default=0.0)
    parser.add_argument("--overhead", type=float, default=0.035)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--epoch", type=int, default=2500, help="iterations of an epoch")
    parser.add_argument("--iterations", type=int, default=0, help="at least; without --compare")
    parser.add_argument("--plain", action="store_true", help="have plain iterations in between; without --compare")
    parser.add_argument("--repeats", type=int, default=2, help="blocks of the ways that stall most")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(args)
    compare(args, training) if args.compare else follow(args, training)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
