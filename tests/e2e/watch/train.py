"""DDP program that trains until a file says otherwise, saves every few steps, and logs values of its own."""

import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastckpt
from fastckpt.ddp import DdpCheckpointer, StorageType

MEMORY, DISK = 5, 20


def main(out: Path, pause: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (out / f"pid.{rank}").write_text(str(os.getpid()))
    torch.manual_seed(7)
    model = nn.Linear(16, 4)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fastckpt.metrics.log(0, {"before": 1 + rank})  # there is no checkpointer yet
    checkpointer = DdpCheckpointer(out / "checkpoints")
    state = checkpointer.load_checkpoint()
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    step = checkpointer.loaded_step if state else 0
    goes_on = torch.ones(1)
    while goes_on.item():
        step += 1
        loss = ddp(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)
        fastckpt.metrics.log(step, {"loss": loss.detach(), "train/lr": 0.01, "bad": math.nan, "rank": rank})
        if step % MEMORY == 0:
            where = StorageType.MEMORY if step % DISK else StorageType.DISK
            checkpointer.save_checkpoint(
                step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, storage_type=where
            )
        goes_on.fill_(not (out / "stop").exists())
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
