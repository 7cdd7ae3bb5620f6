"""Meet by gloo, then die by SIGKILL in turns, until the restart that the argument names."""

import os
import signal
import sys
import time

import torch
from torch import distributed

distributed.init_process_group("gloo")
rank, attempt = distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
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
