"""DDP program small enough to be killed often: gloo, dropout, AdamW, a shuffled sampler, draws of numpy too.

Each rank appends a line of JSON for all that happens to ``<out>/log.<rank>``, and at the end writes the digest of its
weights, its optimizer and its random generator to ``<out>/end.<rank>``.
"""

import argparse
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from fastckpt._core import metrics
from fastckpt._core.snapshot import mutation_check
from fastckpt.ddp import DdpCheckpointer, StorageType, phase, settle

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults.diary import Log, digest
from tests.faults.faults import inject_requested_faults

BATCH = 4
PAUSE = 0.5
"""Seconds that training rests after a save that was skipped for a persist: its steps take a millisecond, and a slow
disk would see nothing of it."""
# torch's optimizers import the compiler, which nothing here uses: a third of the time that a start takes.
sys.modules["torch._dynamo"] = torch._dynamo = MagicMock(disable=lambda function, *args, **kwargs: function)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--memory", type=int, default=2)
    parser.add_argument("--disk", type=int, default=10)
    parser.add_argument("--default", action="store_true", help="leave out the storage type")
    parser.add_argument("--named", action="store_true", help="give each file that is persisted a name of its own")
    parser.add_argument("--wait", action="store_true", help="go on when a save to storage is durable")
    parser.add_argument("--settle", action="store_true")
    parser.add_argument("--stop-at", type=int, default=0, help="train up to here, then wait to be ended")
    parser.add_argument("--wait-at", type=int, nargs="*", default=[], help="wait here until a file go.<step> appears")
    parser.add_argument("--apart", action="store_true", help="no rank waits for another's gradients")
    parser.add_argument("--ballast", type=int, nargs="*", default=[], metavar="MB", help="add to the state; more later")
    parser.add_argument("--grow-at", type=int, default=10**9, help="from here on the ballast is the last of its sizes")
    parser.add_argument("--overlap", action="store_true", help="copy what the optimizer changes in the background")
    parser.add_argument("--deaf", action="store_true", help="to SIGTERM")
    parser.add_argument("--resume-path", default="")
    parser.add_argument("--remote", default="", help="location of the remote tier")
    parser.add_argument("--evaluate-at", type=int, default=0, help="a phase after this step")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds that collectives may take")
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


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    # The agent of a node whose own workers did not fail does not count their restart.
    restarts = torch.tensor(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.all_reduce(restarts)
    others = dist.new_group() if args.skip_at else None
    log, data = Log(args.out, rank), Data(rank, world)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 4))
    ddp = model if args.apart else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(11 + rank)
    random.seed(13 + rank)
    np.random.seed(17 + rank)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(ddp(inputs), targets)

    inject_requested_faults(rank, args.out)
    if args.overlap:
        mutation_check.WORTH = 1  # the largest storage has 2 KB
    checkpointer = DdpCheckpointer(args.checkpoint_dir, remote=args.remote, overlap=optimizer if args.overlap else None)
    if args.settle:
        settle(ddp, lambda: loss_of(data.inputs[:BATCH], data.targets[:BATCH]).backward())
    step = 0
    if loaded := checkpointer.load_checkpoint(args.resume_path):
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        data.epoch, data.taken = (checkpointer.rank_state[name] for name in ("epoch", "taken"))
        step = loaded["step"]
        assert step == checkpointer.loaded_step
    start = [int(os.environ["FAULTS_LAUNCH"]), int(restarts)]
    pending = 0
    log(loaded=step, tier=checkpointer.loaded_from, pid=os.getpid(), start=start)
    while step < args.steps:
        step += 1
        with metrics.phase("train.step", step=step):
            inputs, targets = data.take()
            loss = loss_of(inputs * random.uniform(0.9, 1.1) + np.random.normal(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        log(step=step, loss=loss.item().hex())
        if pending:
            log(saved=pending)
            pending = 0
        if step % args.memory == 0 or step % args.disk == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if args.ballast and rank == 0:  # the only one that copies it
                state["ballast"] = torch.ones(args.ballast[-1 if step >= args.grow_at else 0] << 18)
            place = None if args.default else StorageType.MEMORY if step % args.disk else StorageType.DISK
            own = {"epoch": data.epoch, "taken": data.taken}
            path = str(args.out / f"named-{step}.pt") if args.named and not step % args.disk else ""
            result = checkpointer.save_checkpoint(step, state, path, storage_type=place, rank_state=own)
            if result.pending:
                pending = step
                log(pending=step)
            elif result.saved:
                log(saved=step)
            else:
                log(skipped=step, reason=result.reason)
            if result.trouble:
                log(trouble=result.trouble)
            if args.wait and place is StorageType.DISK:
                checkpointer.wait_latest_checkpoint()
            elif "is being persisted" in result.reason:
                time.sleep(PAUSE)
        if step == args.evaluate_at:
            with phase("evaluation", timeout=60), metrics.phase("train.evaluate", step=step):
                dist.barrier()
        if step == args.skip_at and (rank != 1 or restarts):
            dist.barrier(others)
        if step in args.wait_at:
            log(waiting=step)
            while not (args.out / f"go.{step}").exists():
                time.sleep(0.01)
        if 0 < args.stop_at <= step:
            log(waiting=step)
            time.sleep(600)
    dist.barrier()
    (args.out / f"end.{rank}").write_text(digest([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]))
    checkpointer.close()


def main() -> None:
    args = parse_arguments()
    if args.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.patience))
    train(args)
    # The model is gone by now: were it the last to hold the process group, its end would wait, with the GIL, for a
    # thread of gloo that may be waiting for the GIL.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
