"""Train GPT-2 with DDP, saving its state into shared memory as often as every step.

    fastckpt-run --standalone --nproc_per_node=2 --max-restarts=3 examples/ddp_gpt2/train.py --max_steps 200

Kill a worker: the others restart with it and continue from memory, bit for bit as if nothing had happened.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastckpt.ddp import DdpCheckpointer, settle

sys.path.insert(0, str(Path(__file__).parents[2]))  # a launcher runs this file as a script
from examples.gpt2.options import parser, where_to_save
from examples.gpt2.training import Training, start_process_group


def train(args: argparse.Namespace, device: torch.device) -> None:
    training = Training(args, device, DistributedDataParallel)
    ddp, optimizer, batches = training.model, training.optimizer, training.batches
    model = ddp.module

    def state() -> dict[str, Any]:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": batches}
        return {"step": training.step} | {name: part.state_dict() for name, part in parts.items()}

    with DdpCheckpointer(args.checkpoint_dir) as checkpointer:
        settle(ddp, lambda: training.loss(batches.peek()).backward())
        checkpointer.prepare(state(), optimizer)
        if loaded := checkpointer.load_checkpoint():
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            batches.load_state_dict(loaded["batches"])
            training.step = loaded["step"]
            training.say_resumed(checkpointer.loaded_from)

        while training.step < training.steps:
            training.take_step()
            if place := where_to_save(training.step, training.steps, args):
                result = checkpointer.save_checkpoint(training.step, state(), storage_type=place)
                if not result.saved:
                    training.say(f"step {training.step} was not saved: {result.reason}")
        checkpointer.wait_latest_checkpoint()
    training.finish()


def main() -> None:
    args = parser(__doc__, checkpoint_dir="runs/ddp_gpt2").parse_args()
    train(args, start_process_group(args.device))  # its model must not outlive the process group: gloo may hang then
    dist.barrier()  # gloo aborts a rank whose peer has closed its connections already
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
