"""Rank 1 raises, leaves its process group, and has something to do before its traceback: rank 0 fails before it."""

import os
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
try:
    for number in range(6):
        if rank == 1 and number == 5:
            raise ValueError("bad batch: shard 17 is corrupt")
        dist.all_reduce(torch.ones(1))
finally:
    dist.destroy_process_group()
    if rank == 1:
        time.sleep(0.4)
