"""Train GPT-2 with DeepSpeed, each rank saving its files into shared memory as often as every step.

    fastckpt-run --standalone --nproc_per_node=2 --max-restarts=3 examples/deepspeed_gpt2/train.py --max_steps 200

Kill a worker: the others restart with it and continue from memory, bit for bit as if nothing had happened. Where there
is a GPU, training on the CPU takes ``DS_ACCELERATOR=cpu`` in the environment.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from fastckpt.deepspeed import DeepSpeedCheckpointer

sys.path.insert(0, str(Path(__file__).parents[2]))  # a launcher runs this file as a script
from examples.gpt2.model import GPT
from examples.gpt2.options import parser, where_to_save
from examples.gpt2.training import Training, start_process_group


def configured(args: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's configuration, with what the options say."""
    config: dict[str, Any] = json.loads(args.ds_config.read_text())
    config |= {"train_micro_batch_size_per_gpu": args.batch_size, "gradient_clipping": args.clip}
    config["optimizer"]["params"]["lr"] = args.lr
    return config | {"checkpoint": {"load_universal": args.universal}}


class DeepSpeedTraining(Training):
    """A job whose model is an engine of DeepSpeed, which has an optimizer of its own."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        def start(gpt: GPT) -> deepspeed.DeepSpeedEngine:
            groups = gpt.parameter_groups(args.weight_decay)
            return deepspeed.initialize(model=gpt, model_parameters=groups, config=configured(args))[0]

        super().__init__(args, device, start)

    def make_optimizer(self, gpt: GPT) -> torch.optim.Optimizer:
        """The engine's."""
        return self.model.optimizer

    def learn(self, loss: Tensor) -> None:
        """Learn as DeepSpeed does."""
        self.model.backward(loss)
        self.model.step()

    def weights(self) -> dict[str, Tensor]:
        """The model's, put together if each rank has a part."""
        with deepspeed.zero.GatheredParameters(list(self.model.module.parameters())):
            return {name: tensor.clone() for name, tensor in self.model.module.state_dict().items()}


def train(args: argparse.Namespace, device: torch.device) -> None:
    training = DeepSpeedTraining(args, device)
    engine, batches = training.model, training.batches
    with DeepSpeedCheckpointer(engine, args.checkpoint_dir) as checkpointer:  # instead of the engine, for both below
        _, client_state = checkpointer.load_checkpoint(args.checkpoint_dir)
        if client_state:
            batches.load_state_dict(client_state["batches"])
            training.step = engine.global_steps
            training.say_resumed(checkpointer.loaded_from)

        while training.step < training.steps:
            training.take_step()
            if place := where_to_save(training.step, training.steps, args):
                client_state = {"batches": batches.state_dict()}
                result = checkpointer.save_checkpoint(
                    args.checkpoint_dir, client_state=client_state, storage_type=place
                )
                if not result.saved:
                    training.say(f"step {training.step} was not saved: {result.reason}")
        checkpointer.wait_latest_checkpoint()
    training.finish()
    engine.destroy()


def main() -> None:
    options = parser(__doc__, checkpoint_dir="runs/deepspeed_gpt2")
    options.add_argument("--ds_config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    options.add_argument("--universal", action="store_true", help="go on from what ds_to_universal has made")
    args = options.parse_args()
    if args.device != get_accelerator().device_name():
        options.error(
            f"--device is {args.device}, but DeepSpeed uses {get_accelerator().device_name()}: set DS_ACCELERATOR"
        )
    train(args, start_process_group(args.device))
    gc.collect()  # gloo may hang if a model outlives the process group
    dist.barrier()  # gloo aborts a rank whose peer has closed its connections already
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
