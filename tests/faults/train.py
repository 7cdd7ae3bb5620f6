"""The training with DdpCheckpointer: gloo, dropout, AdamW, a shuffled sampler, draws of Python and numpy too."""

import argparse
import os
import random
import signal
import sys
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from fastckpt._core import metrics
from fastckpt.ddp import DdpCheckpointer, SaveResult, StorageType, phase, settle
from tests.faults import training
from tests.faults.training import Run, Training

BATCH = 4

# torch's optimizers import the compiler, which nothing here uses: a third of the time that a start takes.
sys.modules["torch._dynamo"] = torch._dynamo = MagicMock(disable=lambda function, *args, **kwargs: function)


def parse_arguments() -> argparse.Namespace:
    parser = training.parser()
    parser.set_defaults(steps=60)
    parser.add_argument("--named", action="store_true", help="give each file that is persisted a name of its own")
    parser.add_argument("--settle", action="store_true")
    parser.add_argument("--apart", action="store_true", help="no rank waits for another's gradients")
    parser.add_argument("--ballast", type=int, nargs="*", default=[], metavar="MB", help="add to the state; more later")
    parser.add_argument("--grow-at", type=int, default=10**9, help="from here on the ballast is the last of its sizes")
    parser.add_argument("--deaf", default="", metavar="RANK", help="is deaf to SIGTERM")
    parser.add_argument("--evaluate-at", type=int, default=0, help="a phase after this step")
    parser.add_argument("--skip-at", type=int, default=0, help="a barrier after this step, which rank 1 skips once")
    return parser.parse_args()


class Data:
    """A rank's share of shuffled samples, and the position in it."""

    def __init__(self, rank: int, world: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(96, 8, generator=generator)
        self.targets = torch.randint(4, (96,), generator=generator)
        self._sampler = DistributedSampler(range(96), num_replicas=world, rank=rank, shuffle=True, seed=3)
        self.epoch = self.taken = 0

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._sampler.set_epoch(self.epoch)
        indices = list(self._sampler)[self.taken : self.taken + BATCH]
        self.taken += BATCH
        if self.taken >= len(self._sampler):
            self.epoch, self.taken = self.epoch + 1, 0
        return self.inputs[indices], self.targets[indices]


class Ddp(Training):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        args = self.args
        self._others = dist.new_group() if args.skip_at else None
        self._data = Data(self.rank, self.world)
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 4)
        )
        self.trained = self.model if args.apart else DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(11 + self.rank)
        random.seed(13 + self.rank)
        np.random.seed(17 + self.rank)
        overlap = self.optimizer if args.overlap else None
        self.checkpointer = DdpCheckpointer(args.checkpoint_dir, overlap=overlap)
        if args.settle:
            settle(self.trained, lambda: self._loss(self._data.inputs[:BATCH], self._data.targets[:BATCH]).backward())

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.trained(inputs), targets)

    def resume(self) -> int:
        if not (loaded := self.checkpointer.load_checkpoint()):
            return 0
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self._data.epoch, self._data.taken = (self.checkpointer.rank_state[name] for name in ("epoch", "taken"))
        assert loaded["step"] == self.checkpointer.loaded_step
        return int(loaded["step"])

    def advance(self, step: int) -> torch.Tensor:
        inputs, targets = self._data.take()
        loss = self._loss(inputs * random.uniform(0.9, 1.1) + np.random.normal(), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def save(self, step: int, place: StorageType) -> SaveResult:
        args = self.args
        state: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["step"] = step
        if args.ballast and self.rank == 0:  # the only one that copies it
            state["ballast"] = torch.ones(args.ballast[-1 if step >= args.grow_at else 0] << 18)
        own = {"epoch": self._data.epoch, "taken": self._data.taken}
        path = str(args.out / f"named-{step}.pt") if args.named and place is StorageType.DISK else ""
        return self.checkpointer.save_checkpoint(step, state, path, storage_type=place, rank_state=own)

    def after(self, step: int) -> None:
        if step == self.args.evaluate_at:
            with phase("evaluation", timeout=60), metrics.phase("train.evaluate", step=step):
                dist.barrier()
        if step == self.args.skip_at and (self.rank != 1 or self.run.restarts):
            dist.barrier(self._others)


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.deaf == os.environ["RANK"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    training.main(Ddp, arguments)
