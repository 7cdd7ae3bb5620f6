"""A job with slow ranks: slow_rank.py DIRECTORY PLAN.

PLAN is a JSON list of [first step, last step, rank, part, seconds]: this rank sleeps in this part.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastckpt.ddp import DdpCheckpointer

PLAN = json.loads(sys.argv[2])
LAST = max(entry[1] for entry in PLAN) + 1
now = 0


def nap(part: str) -> None:
    """Lose the time that the plan has for this part of this step."""
    for first, last, rank, what, seconds in PLAN:
        if first <= now < last and dist.get_rank() == rank and what == part:
            time.sleep(seconds)


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        nap("forward")
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        nap("backward")
        return gradient


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, given):
        return given + Nap.apply(self.layer(given)).relu()


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(64, 64), Block(), torch.nn.Linear(64, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = DdpCheckpointer(sys.argv[1])
for now in range(LAST):  # noqa: B007 (read by nap)
    nap("data")
    given = torch.randn(16, 64)
    model(given).square().mean().backward()
    nap("rest")
    optimizer.step()
    optimizer.zero_grad()
checkpointer.save_checkpoint(LAST, {"model": layers.state_dict()})
checkpointer.close()
dist.destroy_process_group()
