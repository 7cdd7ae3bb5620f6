"""Train, save every few steps and fail as told, at each start in another step."""

import argparse
import os
import time
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--every", type=int, default=10, help="steps between saves")
parser.add_argument(
    "--fail", type=int, nargs="*", default=[], help="in which step, at each start, the last repeats; -7: wait in step 7"
)
parser.add_argument("--pace", type=float, default=0.0, help="seconds per step")
arguments = parser.parse_args()

folder, attempt = Path(os.environ["JOB_FOLDER"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(folder / f"pid.{os.getpid()}").touch()
fail = arguments.fail[min(attempt, len(arguments.fail) - 1)] if arguments.fail else arguments.steps + 1


def log(text: str) -> None:
    with (folder / "log").open("a") as file:
        file.write(f"{attempt} {text}\n")


log(f"begins {os.environ['TORCHELASTIC_MAX_RESTARTS']}")
w = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([w], lr=0.1)
checkpointer = DdpCheckpointer(folder / "checkpoints")
loaded = checkpointer.load_checkpoint()
for step in range(checkpointer.loaded_step + 1 if loaded else 1, arguments.steps + 1):
    if step == fail:
        raise ValueError("MARK")
    if step == -fail:
        time.sleep(600)
    w.grad = torch.ones(3)
    optimizer.step()
    log(f"step {step}")
    if step % arguments.every == 0:
        checkpointer.save_checkpoint(step, {"w": w.detach()}, storage_type=StorageType.MEMORY)
    time.sleep(arguments.pace)
