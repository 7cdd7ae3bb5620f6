"""Meet by the init method that the argument names, and add up the ranks."""

import os
import sys

import torch
from torch import distributed

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
distributed.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=world)
total = torch.tensor([rank])
distributed.all_reduce(total)
assert total.item() == sum(range(world))
distributed.barrier()
distributed.destroy_process_group()
