"""A sharded training of three lines for checkpoints: `fastckpt.Checkpointer` finds out by itself how it is sharded.

Each rank appends a line of JSON for each start and step to ``<out>/log.<rank>``, with the samples that the step used,
and at the end writes the digest of the full weights and states and of its random generator to ``<out>/end.<rank>``.
"""

import argparse
import gc
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from fastckpt import Checkpointer
from fastckpt._core.snapshot import mutation_check
from fastckpt.data import ResumableDataLoader

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.faults.diary import Log, digest
from tests.faults.faults import inject_requested_faults
from tests.faults.programs.fsdp import build, full_state

warnings.filterwarnings("ignore")
TENSOR_RANKS = {"tp": lambda world: world, "2d": lambda world: 2}
"""Ranks that share the batches, for they have parts of the same tensors."""


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Noise is added to each, so that the random numbers of samples count."""

    def __init__(self, count: int) -> None:
        self._inputs = torch.randn(count, 7, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self._inputs[index] + 0.1 * torch.randn(7)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--way", default="fsdp2", help="fsdp2, fsdp1, hsdp, tp or 2d")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, nargs=2, default=None, metavar=("MEMORY", "STORAGE"))
    parser.add_argument("--wait", action="store_true", help="go on when a save to storage is durable")
    parser.add_argument("--stop-at", type=int, default=0, help="train up to here, then wait to be ended")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    log, model = Log(args.out, rank), build(args.way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # its state has numbers for keys
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 16], 0.5)
    sharing = TENSOR_RANKS.get(args.way, lambda world: 1)(world)
    replicas, replica = world // sharing, rank // sharing
    loader = ResumableDataLoader(
        Samples(args.samples), args.batch, shuffle=True, seed=3, num_replicas=replicas, rank=replica
    )
    torch.manual_seed(11 + replica)
    mutation_check.WORTH = 1  # states copied in the background are small here
    inject_requested_faults(rank, args.out)
    every = {"memory": args.every[0], "storage": args.every[1]} if args.every else "auto"
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    with Checkpointer(args.checkpoint_dir, **parts, every=every) as checkpointer:
        step = checkpointer.resume()
        start = [int(os.environ[name]) for name in ("FAULTS_LAUNCH", "TORCHELASTIC_RESTART_COUNT")]
        tier = checkpointer._checkpointer.loaded_from
        log(loaded=step, tier=tier, world=world, start=start)
        for epoch in range(loader.epoch, args.epochs):
            for indices, inputs in loader:
                step += 1
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                log(step=step, loss=loss.item().hex(), samples=indices.tolist(), epoch=epoch)
                if (result := checkpointer.step(step)) is not None:
                    log(due=step, done=bool(result))
                    if args.wait and step % every["storage"] == 0:
                        checkpointer._checkpointer.wait_latest_checkpoint()
                if 0 < args.stop_at <= step:
                    time.sleep(600)
    full = full_state(model, optimizer)
    state = [full if rank == 0 else rank, scheduler.state_dict(), torch.get_rng_state()]
    (args.out / f"end.{rank}").write_text(digest(state))


if __name__ == "__main__":
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    train(arguments)
    gc.collect()  # FSDP1 has cycles: gloo ends a process whose groups end late
    dist.barrier()
    dist.destroy_process_group()
