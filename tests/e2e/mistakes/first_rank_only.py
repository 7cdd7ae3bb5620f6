"""A worker whose first rank alone saves, as scripts do that wrote checkpoints with torch.save."""

import sys

import torch
import torch.distributed as dist

from fastckpt import Checkpointer
from fastckpt.ddp import DdpCheckpointer, StorageType

WHAT, DIRECTORY = sys.argv[1:]

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    if WHAT == "saves":
        with DdpCheckpointer(DIRECTORY) as checkpointer:
            checkpointer.load_checkpoint()
            for step in range(6):
                if dist.get_rank() == 0:
                    checkpointer.save_checkpoint(step, model.state_dict(), storage_type=StorageType.DISK)
                dist.barrier()
    else:
        with Checkpointer(DIRECTORY, model=model, every=1) as three_lines:
            three_lines.resume()
            for step in range(1, 7):
                if dist.get_rank() == 0:
                    three_lines.step(step)
                dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
