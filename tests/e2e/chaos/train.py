"""A tiny training on each rank's own data, right by default; --fault leaves out something that a resume needs."""

import argparse
import sys
import time
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn

from fastckpt import DdpCheckpointer, StorageType, metrics

# torch's optimizers import the compiler, which nothing here uses: a third of the time that a start takes.
sys.modules["torch._dynamo"] = torch._dynamo = MagicMock(disable=lambda function, *args, **kwargs: function)

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--memory", type=int, default=2)
parser.add_argument("--disk", type=int, default=6)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--fault", default="")
arguments = parser.parse_args()
fault = arguments.fault

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(5)
samples = torch.randn(64, 8, generator=generator)
order = torch.randperm(64, generator=generator)
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
noise = torch.Generator().manual_seed(11 + rank)
position = 0


def batch() -> torch.Tensor:
    global position
    # Uneven: rank 1 takes one more each time.
    size = 4 + rank
    indices = order[torch.arange(position, position + size) % 64]
    position += size
    return samples[indices]


checkpointer = DdpCheckpointer("/tmp/fixed" if fault == "fixed" else arguments.out)
step = 0
if loaded := checkpointer.load_checkpoint():
    model.load_state_dict(loaded["model"])
    if fault != "optimizer":
        optimizer.load_state_dict(loaded["optimizer"])
    own = checkpointer.rank_state
    position = own["position"]
    noise.set_state(own["noise"])
    step = loaded["step"]
while step < arguments.steps:
    step += 1
    inputs = batch()
    inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=noise)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    metrics.log(step, {"loss": loss})
    if step % arguments.memory == 0 or step % arguments.disk == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        place = StorageType.MEMORY if step % arguments.disk else StorageType.DISK
        checkpointer.save_checkpoint(
            step, state, storage_type=place, rank_state={"position": position, "noise": noise.get_state()}
        )
        if place is StorageType.DISK:
            checkpointer.wait_latest_checkpoint()  # else a slow disk has the next saves skipped
    time.sleep(arguments.pause)
checkpointer.close()
dist.barrier()
dist.destroy_process_group()
