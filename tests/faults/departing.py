"""A training without collectives in its loop, of which one rank closes early; writes what became of each save."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fastckpt.ddp import DdpCheckpointer, StorageType


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--leaves", type=int, help="the rank that closes early")
    parser.add_argument("--last", type=int, help="its last step")
    parser.add_argument("--until", type=int, default=8)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (arguments.out / f"said.{rank}").open("a") as log:

        def say(**line: object) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()

        with DdpCheckpointer(arguments.checkpoint_dir) as checkpointer:
            state = checkpointer.load_checkpoint()
            say(loaded=checkpointer.loaded_step, weight=float(state["w"][0]) if state else 0.0)
            until = arguments.last if rank == arguments.leaves else arguments.until
            for step in range(checkpointer.loaded_step + 1, until + 1):
                while rank != arguments.leaves and step == arguments.last + 1 and not _has_closed(arguments):
                    time.sleep(0.01)
                result = checkpointer.save_checkpoint(
                    step, {"w": torch.full((1000,), float(step))}, storage_type=StorageType.DISK
                )
                say(step=step, saved=result.saved, reason=result.reason)
                if step <= arguments.last:
                    dist.barrier()
                    checkpointer.wait_latest_checkpoint(120)
        (arguments.out / f"closed.{rank}").touch()
        say(closed=True)
    dist.barrier()
    dist.destroy_process_group()


def _has_closed(arguments: argparse.Namespace) -> bool:
    return (arguments.out / f"closed.{arguments.leaves}").exists()


if __name__ == "__main__":
    main()
