"""A training of three lines for checkpoints: `fastckpt.Checkpointer` with a `ResumableDataLoader`, under DDP over gloo.

Each rank appends a line of JSON for each start and step to ``<out>/log.<rank>``, with the samples that the step used,
and at the end writes the digest of its weights, its optimizer and its random generator to ``<out>/end.<rank>``.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastckpt import Checkpointer
from fastckpt.data import ResumableDataLoader
from fastckpt.engine import still

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults.train import Log, digest


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor, int]]):
    """Noise is added to each, so that the random numbers of samples count."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._inputs = torch.randn(count, 8, generator=generator)
        self._targets = torch.randint(4, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, self._inputs[index] + 0.1 * torch.randn(8), int(self._targets[index])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--every", type=int, nargs=2, default=None, metavar=("MEMORY", "STORAGE"))
    parser.add_argument("--stop-at", type=int, default=0, help="train up to here, then wait to be ended")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    draft = args.out / f"draft.{rank}"
    draft.write_text(str(os.getpid()))
    draft.rename(args.out / f"pid.{rank}")
    log = Log(args.out, rank)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = ResumableDataLoader(
        Samples(args.samples), args.batch, shuffle=True, seed=3, num_workers=args.loader_workers
    )
    torch.manual_seed(11 + rank)
    still.WORTH = 1  # what is copied behind training is small here

    every = {"memory": args.every[0], "storage": args.every[1]} if args.every else "auto"
    with Checkpointer(
        args.checkpoint_dir, model=ddp, optimizer=optimizer, scheduler=scheduler, data=loader, every=every
    ) as checkpointer:
        step = checkpointer.resume()
        log(loaded=step, world=world, start=[int(os.environ["FAULTS_LAUNCH"]), os.getpid()])
        for epoch in range(loader.epoch, args.epochs):
            for indices, inputs, targets in loader:
                loss = nn.functional.cross_entropy(ddp(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                log(step=step, loss=loss.item().hex(), samples=indices.tolist(), epoch=epoch)
                checkpointer.step(step)
                if 0 < args.stop_at <= step:
                    time.sleep(600)
    state = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()]
    (args.out / f"end.{rank}").write_text(digest(state))


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
