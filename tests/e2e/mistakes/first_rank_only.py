"""A worker whose first rank alone saves, as scripts do that wrote checkpoints with torch.save."""

import sys

import torch
import torch.distributed as dist

from fastckpt import Checkpointer

if __name__ == "__main__":
    dist.init_process_group("gloo")
    with Checkpointer(sys.argv[1], model=torch.nn.Linear(4, 4), every=1) as three_lines:
        three_lines.resume()
        for step in range(1, 7):
            if dist.get_rank() == 0:
                three_lines.step(step)
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
