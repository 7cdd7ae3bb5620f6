"""Meet by gloo, then die by SIGKILL in turns until a restart: restart.py RESTARTS INIT_METHOD."""

import os
import signal
import sys
import time

import torch
from torch import distributed

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert distributed.is_torchelastic_launched()
distributed.init_process_group("gloo", sys.argv[2], rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
total = torch.ones(1)
distributed.all_reduce(total)
assert total.item() == distributed.get_world_size()
distributed.barrier()
with open(os.path.join(os.environ["JOB_FOLDER"], "log"), "a") as log:
    log.write(f"{attempt} {rank}\n")
distributed.barrier()
if attempt < int(sys.argv[1]):
    if rank == attempt % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
distributed.destroy_process_group()
