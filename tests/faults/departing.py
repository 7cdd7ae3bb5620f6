"""DDP program without collectives in its loop, of which one rank leaves early; logs the result of each save."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastckpt._core import metrics
from fastckpt.ddp import DdpCheckpointer, StorageType


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--leaves", type=int, default=-1, help="the rank that closes early")
    parser.add_argument("--raises", action="store_true", help="rank 1 fails after the last step, as rank 0 copies it")
    parser.add_argument("--last", type=int, help="its last step")
    parser.add_argument("--until", type=int, default=8)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if arguments.raises and rank == 0:
        copy_slowly(arguments)
    with (arguments.out / f"said.{rank}").open("a") as log:

        def say(**line: object) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()

        with DdpCheckpointer(arguments.checkpoint_dir) as checkpointer:
            state = checkpointer.load_checkpoint()
            say(loaded=checkpointer.loaded_step, weight=float(state["w"][0]) if state else 0.0)
            until = arguments.last if rank == arguments.leaves else arguments.until
            for step in range(checkpointer.loaded_step + 1, until + 1):
                if step == arguments.last + 1 and rank != arguments.leaves:
                    wait_for(arguments.out / f"closed.{arguments.leaves}")
                result = checkpointer.save_checkpoint(
                    step, {"w": torch.full((1000,), float(step))}, storage_type=StorageType.DISK
                )
                say(step=step, saved=result.saved, reason=result.reason)
                if arguments.raises and (rank, step) == (1, arguments.last):
                    wait_for(arguments.out / "copies")
                    raise RuntimeError("the disk of the logger is full")
                if step < arguments.last + (arguments.leaves >= 0):
                    dist.barrier()
                    checkpointer.wait_latest_checkpoint(120)
        (arguments.out / f"closed.{rank}").touch()
        say(closed=True)
    dist.barrier()
    dist.destroy_process_group()


def copy_slowly(arguments: argparse.Namespace) -> None:
    """Have the copy of the last step go on until the other rank has failed, and beyond."""

    def see(name: str, fields: dict[str, Any]) -> None:
        if (name, fields.get("step")) == ("snapshot.fill", arguments.last):
            (arguments.out / "copies").touch()
            time.sleep(3)

    metrics.observe(see)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
