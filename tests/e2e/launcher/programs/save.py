"""Save as the arguments say, and log what became of each save: a line of JSON in ``saves``."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("--saves", type=int, default=1)
parser.add_argument("--disk", type=int, default=1, help="every so many saves; 0 for never")
parser.add_argument("--path", default="")
parser.add_argument("--numbers", type=int, default=1000)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--until-trouble", action="store_true", help="wait until a persist has failed")
parser.add_argument("--exit", type=int, default=0)
arguments = parser.parse_args()

folder = Path(os.environ["JOB_FOLDER"])
(folder / f"pid.{os.getpid()}").touch()
checkpointer = DdpCheckpointer("checkpoints")
checkpointer.load_checkpoint()
first = checkpointer.loaded_step + 1
with (folder / "saves").open("a", buffering=1) as log:
    for step in range(first, first + arguments.saves):
        place = StorageType.DISK if arguments.disk and step % arguments.disk == 0 else StorageType.MEMORY
        state = {"w": torch.full((arguments.numbers,), float(step)), "step": step}
        result = checkpointer.save_checkpoint(step, state, path=arguments.path, storage_type=place)
        line = {**vars(result), "loaded": first - 1, "tier": checkpointer.loaded_from}
        log.write(json.dumps(line) + "\n")
        time.sleep(arguments.pause)
while arguments.until_trouble and not checkpointer._writer.link.status().trouble:
    time.sleep(0.02)
sys.exit(arguments.exit)
