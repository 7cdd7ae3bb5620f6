"""Train GPT-2 with FSDP, each rank saving its shards into shared memory as often as every step.

    fastckpt-run --standalone --nproc_per_node=2 --max-restarts=3 examples/fsdp_gpt2/train.py --max_steps 200

Kill a worker: the others restart with it and continue from memory, bit for bit as if nothing had happened. Start it
again with another number of workers: each takes what it needs of the shards of all.
"""

import argparse
import gc
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fastckpt.fsdp import FsdpShardCheckpointer

sys.path.insert(0, str(Path(__file__).parents[2]))  # a launcher runs this file as a script
from examples.gpt2.model import GPT, Block
from examples.gpt2.options import parser, where_to_save
from examples.gpt2.training import Training, start_process_group


def fsdp2(model: GPT, mesh: DeviceMesh) -> nn.Module:
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def fsdp1(model: GPT, mesh: DeviceMesh) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    device = next(model.parameters()).device
    # Given a mesh it saves DTensors, else ShardedTensors, of which torch warns.
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=device, use_orig_params=True, device_mesh=mesh
    )


def train(args: argparse.Namespace, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    training = Training(args, device, partial(fsdp1 if args.fsdp1 else fsdp2, mesh=mesh))
    model, optimizer, batches = training.model, training.optimizer, training.batches
    with FsdpShardCheckpointer(args.checkpoint_dir) as checkpointer:
        if extra := checkpointer.load_checkpoint(model, optimizer):
            batches.load_state_dict(extra["batches"])
            training.step = extra["step"]
            training.say_resumed(checkpointer.loaded_from)

        while training.step < training.steps:
            training.take_step()
            if place := where_to_save(training.step, training.steps, args):
                extra = {"step": training.step, "batches": batches.state_dict()}
                result = checkpointer.save_checkpoint(
                    training.step, storage_type=place, model=model, optimizer=optimizer, extra_sd=extra
                )
                if not result.saved:
                    training.say(f"step {training.step} was not saved: {result.reason}")
        checkpointer.wait_latest_checkpoint()
    training.finish()


def main() -> None:
    options = parser(__doc__, checkpoint_dir="runs/fsdp_gpt2")
    options.add_argument("--fsdp1", action="store_true", help="FullyShardedDataParallel instead of fully_shard")
    args = options.parse_args()
    train(args, start_process_group(args.device))
    gc.collect()  # FSDP1 has cycles, and gloo may hang if a model outlives the process group
    dist.barrier()  # gloo aborts a rank whose peer has closed its connections already
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
