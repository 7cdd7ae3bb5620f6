"""A job with slow ranks: slow_rank.py DIRECTORY PLAN [ddp|fsdp] [LAST STEP].

PLAN is a JSON list of [first step, last step, ranks, part, seconds]: these ranks sleep in this part, or do other things
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastckpt
from fastckpt.ddp import DdpCheckpointer

PLAN = json.loads(sys.argv[2])
KIND = sys.argv[3] if len(sys.argv) > 3 else "ddp"
LAST = int(sys.argv[4]) if len(sys.argv) > 4 else max(entry[1] for entry in PLAN) + 1
NAP = float(os.environ.get("STEP_NAP", "0"))
now = 0


def nap(part: str) -> None:
    """Lose the time that the plan has for this part of this step."""
    for first, last, ranks, what, seconds in PLAN:
        if first <= now < last and dist.get_rank() in ranks and what == part:
            time.sleep(seconds)


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        time.sleep(NAP)
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
if KIND == "fsdp":
    from torch.distributed.fsdp import fully_shard

    fully_shard(layers[1])
    model = fully_shard(layers)
else:
    model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = DdpCheckpointer(sys.argv[1])
for now in range(LAST):
    nap("data")
    given = torch.randn(16, 64)
    model(given).square().mean().backward()
    nap("rest")
    optimizer.step()
    optimizer.zero_grad()
    for first, _, ranks, what, seconds in PLAN:
        if first == now and dist.get_rank() in ranks:
            if what == "evaluation":
                with torch.no_grad(), fastckpt.phase("evaluation"):
                    time.sleep(seconds)
            elif what == "unmarked evaluation":
                time.sleep(seconds)
            elif what == "save":
                checkpointer.save_checkpoint(now, {"model": {"weight": torch.zeros(int(seconds))}})
            elif what == "exit":
                marker = Path(sys.argv[1]) / "died"
                if not marker.exists():
                    marker.touch()
                    os._exit(3)
if KIND == "ddp":
    checkpointer.save_checkpoint(LAST, {"model": layers.state_dict()})
checkpointer.close()
dist.destroy_process_group()
