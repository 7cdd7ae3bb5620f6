"""Two workers under DDP whose saves `fastckpt plan` measures."""

import argparse
import time

import torch
import torch.distributed as dist

from fastckpt import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--elsewhere", default="")
arguments = parser.parse_args()
dist.init_process_group("gloo")
checkpointer = DdpCheckpointer(arguments.out, remote=arguments.elsewhere and f"{arguments.elsewhere}/remote")
checkpointer.load_checkpoint()
state = {"w": torch.ones(300_000), "step": 0}
for step in range(1, 100_000):
    state["step"] = step
    path = f"{arguments.elsewhere}/model.pt" if arguments.elsewhere else ""
    checkpointer.save_checkpoint(step, state, path, StorageType.DISK if step % 4 == 1 else StorageType.MEMORY)
    time.sleep(0.05)
