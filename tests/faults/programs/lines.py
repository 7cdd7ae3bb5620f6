"""The training with three lines for checkpoints: `fastckpt.Checkpointer` with a `ResumableDataLoader`, over gloo.

The log has the samples of a step.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastckpt import Checkpointer
from fastckpt._core.snapshot import mutation_check
from fastckpt.data import ResumableDataLoader
from tests.faults import training
from tests.faults.training import Run


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor, int]]):
    """Noise is added to each, so that the random numbers of samples count."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self._inputs = torch.randn(96, 8, generator=generator)
        self._targets = torch.randint(4, (96,), generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, self._inputs[index] + 0.1 * torch.randn(8), int(self._targets[index])


def parse_arguments() -> argparse.Namespace:
    parser = training.parser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, nargs=2, default=None, metavar=("MEMORY", "STORAGE"))
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    run = Run(args, dist.get_rank())
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = ResumableDataLoader(Samples(), 4, shuffle=True, seed=3)
    torch.manual_seed(11 + run.rank)
    mutation_check.WORTH = 1  # states copied in the background are small here
    parts = {"model": ddp, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    every: Any = {"memory": args.every[0], "storage": args.every[1]} if args.every else "auto"
    with Checkpointer(args.checkpoint_dir, **parts, every=every) as checkpointer:
        step = checkpointer.resume()
        run.resumed(step, checkpointer._checkpointer.loaded_from, world=dist.get_world_size())
        for epoch in range(loader.epoch, args.epochs):
            for indices, inputs, targets in loader:
                step += 1
                run.begins(step)
                loss = nn.functional.cross_entropy(ddp(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.trained(step, loss, samples=indices.tolist(), epoch=epoch)
                if (result := checkpointer.step(step)) is not None:
                    run.log(due=step)
                    run.saved(step, result)
                run.waits(step)
    run.end([model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()])
    assert not {"fastckpt.checkpointer.sharded_backend", "fastckpt.dcp"} & sys.modules.keys(), (
        "who has no shards pays for them"
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(parse_arguments())
    dist.barrier()
    dist.destroy_process_group()
