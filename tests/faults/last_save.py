"""Ranks of which 1 is killed when it has saved step 7, and 0 saves that step when it is asked to end.

Each start appends what it has loaded to ``<out>/loaded.<rank>``.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fastckpt.ddp import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--checkpoint-dir", required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
checkpointer = DdpCheckpointer(args.checkpoint_dir)


def save(step: int) -> None:
    result = checkpointer.save_checkpoint(step, {"model": torch.full((1000,), step)}, storage_type=StorageType.MEMORY)
    assert result.saved, result.reason


def save_and_end(number: int, frame: object) -> None:
    save(7)
    sys.exit()


state = checkpointer.load_checkpoint()
with (args.out / f"loaded.{rank}").open("a") as log:
    log.write(f"{checkpointer.loaded_step} {checkpointer.loaded_from} {state['model'][0].item() if state else ''}\n")
if not state:
    for step in range(1, 7):
        save(step)
        dist.barrier()
    if rank == 0:
        signal.signal(signal.SIGTERM, save_and_end)
    dist.barrier()
    if rank == 1:
        save(7)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
dist.barrier()
checkpointer.close()
dist.barrier()
dist.destroy_process_group()
