"""The training whose failure docs_site/pictures/failure.py draws: two ranks, of which one kills itself once.

It appends the instant of its death to the event log, where nobody else can know it.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastckpt.ddp import DdpCheckpointer, StorageType

STEPS, KILLED_IN = 60, 43


def die(log: Path, step: int) -> None:
    line = {"event": "killed", "time": time.time(), "monotonic": time.monotonic(), "pid": os.getpid(), "step": step}
    with log.open("a") as file:
        file.write(json.dumps(line | {"rank": dist.get_rank()}) + "\n")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(args.layers) for layer in (nn.Linear(args.width, args.width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, args.width)
    with DdpCheckpointer(args.checkpoints) as checkpointer:
        if state := checkpointer.load_checkpoint():
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(max(checkpointer.loaded_step, 0) + 1, STEPS + 1):
            loss = model(batch).square().mean()
            if step == KILLED_IN and not state and dist.get_rank() == 1:
                die(args.record, step)  # the other rank waits for its gradients
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state_now = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            checkpointer.save_checkpoint(step, state_now, storage_type=StorageType.MEMORY)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
