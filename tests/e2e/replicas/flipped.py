"""A training of replicas in which one bit of one rank flips, once, as by a processor that is broken."""

import argparse
import os
import random
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[3]))
from fastckpt import Checkpointer
from fastckpt._core.replicas import rank_differences
from fastckpt.ddp import settle
from tests.faults.diary import Log, digest, parser_of_all

warnings.filterwarnings("ignore")
rank_differences.SHARE = 1.0  # a comparison is due after as many steps in each run, however slow the machine is


def flip(model: nn.Module, optimizer: torch.optim.Optimizer, chance: random.Random) -> str:
    """Flip a random bit of a parameter, or of a state of the optimizer."""
    tensors = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name} {key}"] = value
    name = chance.choice([name for name, each in tensors.items() if each.numel() > 1])
    numbers = tensors[name].detach().reshape(-1).view(torch.int32)
    # One of the least flips in vain: rounding makes it good again within some steps.
    at, bit = chance.randrange(len(numbers)), chance.randrange(16, 26)
    numbers[at] ^= 1 << bit
    return f"{name}[{at}] bit {bit}"


def train(args: argparse.Namespace) -> None:
    rank, log = dist.get_rank(), Log(args.out, dist.get_rank())
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 5)))
    settle(model, lambda: model(torch.ones(6, 7)).sum().backward())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    every = {"memory": args.memory, "storage": args.disk}
    checkpointer = Checkpointer(args.checkpoint_dir, model=model, optimizer=optimizer, every=every)
    step = checkpointer.resume()
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    chance = random.Random(1 + restart)
    flip_at = step + args.at[restart] if restart < len(args.at) else 0
    log(loaded=step, tier="", start=[int(os.environ["FAULTS_LAUNCH"]), restart])
    while step < args.steps:
        step += 1
        inputs = torch.randn(6, 7, generator=torch.Generator().manual_seed(1000 * step + rank))
        torch.manual_seed(1000 * step + rank)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step == flip_at:
            log(flipped=flip(model, optimizer, chance))
        log(step=step, loss=loss.item().hex())
        if (result := checkpointer.step(step)) is not None:
            log(due=step, done=bool(result))
    checkpointer.close()
    state = {name: each.detach() for name, each in model.named_parameters()}
    (args.out / f"end.{rank}").write_text(digest(state))


if __name__ == "__main__":
    parser = parser_of_all()
    parser.set_defaults(steps=400, memory=10, disk=50)
    parser.add_argument("--at", type=int, nargs="*", default=[], help="these steps of each start, one after the other")
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.barrier()
    dist.destroy_process_group()
