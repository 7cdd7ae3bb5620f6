"""Save twice, each rank to a directory of its own."""

import os
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer

with DdpCheckpointer(Path(os.environ["JOB_FOLDER"]) / f"rank{os.environ['RANK']}") as checkpointer:
    for step in range(2):
        checkpointer.save_checkpoint(step, {"w": torch.zeros(4)})
