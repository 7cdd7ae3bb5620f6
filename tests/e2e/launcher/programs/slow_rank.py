"""A job with slow ranks: slow_rank.py DIRECTORY PLAN.

PLAN is a JSON list of [first step, last step, rank, part, seconds]: this rank sleeps in this part.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

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
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        nap("backward")
        return gradient


class Napping(torch.nn.Linear):
    def forward(self, given):
        return Nap.apply(super().forward(given)).relu()


dist.init_process_group("gloo")
layers = torch.nn.Sequential(torch.nn.Linear(64, 64), Napping(64, 64), torch.nn.Linear(64, 1))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with DdpCheckpointer(sys.argv[1]) as checkpointer:
    for now in range(LAST):  # noqa: B007 (read by nap)
        model(torch.randn(16, 64)).square().mean().backward()
        nap("rest")
        optimizer.step()
        optimizer.zero_grad()
    checkpointer.save_checkpoint(LAST, {"model": layers.state_dict()})
dist.destroy_process_group()
