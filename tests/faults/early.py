"""Ranks that leave a job at different times: one goes on, one closes its checkpointer, one exits, one had none."""

import argparse
import os
import time
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer

LONG = 8.0
"""Seconds that the first rank goes on: longer than any silence that is allowed."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    if rank == 3:
        time.sleep(LONG)
        return
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    checkpointer = DdpCheckpointer(args.checkpoint_dir)

    def train(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            parameter.grad = torch.ones(2)
            optimizer.step()
            time.sleep(0.1)

    train(0.5)
    if rank == 2:
        os._exit(0)
    if rank == 1:
        checkpointer.close()
        time.sleep(LONG)
        return
    train(LONG)
    checkpointer.close()
    (args.out / "steps").write_text("done")


if __name__ == "__main__":
    main()
