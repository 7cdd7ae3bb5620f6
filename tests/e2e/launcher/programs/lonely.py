"""Rank 1 fails, or rank 0 loses a connection by itself; the others lose theirs in the next collective.

The one that fails has something to do before its traceback, as it leaves its process group: rank 0 fails before it.
"""

import sys
import time

import torch
import torch.distributed as dist

from fastckpt import DdpCheckpointer

dist.init_process_group("gloo")
try:
    with DdpCheckpointer("checkpoints") as checkpointer:
        checkpointer.load_checkpoint()
        if dist.get_rank() == 1 and sys.argv[1] == "fails":
            raise ValueError("MARK")
        if dist.get_rank() == 0 and sys.argv[1] == "loses":
            raise RuntimeError("MARK: Connection closed by peer")
        dist.all_reduce(torch.ones(1))
finally:
    if dist.get_rank() == 1 and sys.argv[1] == "fails":
        dist.destroy_process_group()
        time.sleep(0.4)
