"""GPT-2 in training: what a step takes, and what is left in the end."""

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional

from examples.gpt2.data import Batch, ShuffledBatches, read_text, split, validation_batch
from examples.gpt2.model import GPT, GPTConfig
from examples.gpt2.options import learning_rate
from examples.gpt2.progress import Progress
from fastckpt import metrics, phase
from fastckpt.offload import ActivationOffload


def start_process_group(kind: str) -> torch.device:
    """Join the other ranks; the device on which this one trains."""
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may sum in another order
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class Training:
    """One rank of a job.

    Args:
        args: Result of `examples.gpt2.options.parser`.
        device: Device on which this rank trains.
        wrap: Makes of a model one that trains together with those of the other ranks.

    Attributes:
        model: The model as ``wrap`` returned it.
        optimizer: Its optimizer.
        batches: The data, and the position in them.
        step: The last step that was done.
        steps: Number of steps to do.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, wrap: Callable[[GPT], nn.Module]) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        tokens, held_out = split(read_text(args.data_dir), args.block_size)
        self.batches = ShuffledBatches(tokens, args.block_size, args.batch_size, rank, world_size, args.seed)
        self.step, self.steps = 0, args.max_steps or args.epochs * self.batches.steps_per_epoch
        self._held_out = validation_batch(held_out, args.block_size, args.eval_blocks, rank, world_size)
        self._args, self._device, self._rank = args, device, rank
        self._offload = ActivationOffload(args.offload, budget=args.offload_budget) if args.offload else None
        self._progress = Progress(rank, self.steps, args.log_interval, args.losses)

        torch.manual_seed(args.seed)
        self._shape = GPTConfig(256, args.block_size, args.n_layer, args.n_head, args.n_embd, args.dropout)
        gpt = GPT(self._shape).to(device)
        self.model = wrap(gpt)
        self.optimizer = self.make_optimizer(gpt)
        torch.manual_seed(args.seed + 1 + rank)  # each rank drops out other activations

    def make_optimizer(self, gpt: GPT) -> torch.optim.Optimizer:
        """The optimizer of ``self.model``, which ``gpt`` has become."""
        return torch.optim.AdamW(gpt.parameter_groups(self._args.weight_decay), self._args.lr, (0.9, 0.95), fused=True)

    def say(self, text: str) -> None:
        """Print, on rank 0."""
        self._progress.say(text)

    def say_resumed(self, tier: str) -> None:
        """Say where the training goes on; or that there is nothing left to do, if a finished one is started again."""
        self.say(f"resumed at step {self.step} from {tier}")
        if self.step >= self.steps:
            self.say(f"all {self.steps} steps were done before: nothing is trained")

    def loss(self, batch: Batch) -> Tensor:
        """This rank's mean loss."""
        tokens, targets = (part.to(self._device) for part in batch)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            return functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def take_step(self) -> None:
        """Learn from the next batch, evaluate now and then, and tell of it."""
        args = self._args
        self.step += 1
        lr = learning_rate(self.step, self.steps, args.warmup, args.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self._offload or nullcontext():
            loss = self.loss(self.batches.take())
        self.learn(loss)
        evaluates = self.step % args.eval_interval == 0 or self.step == self.steps
        validation = self._evaluate() if evaluates else None
        self._progress.step(self.step, _over_ranks(loss), lr, validation)
        metrics.event("step", step=self.step, rank=self._rank)

    def learn(self, loss: Tensor) -> None:
        """Have the optimizer take a step down the gradient of ``loss``."""
        loss.backward()
        _clip(self.model, self._args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """The model's, whole, on rank 0; all ranks call it."""
        # Moving what lies there already ends FSDP1 with a segmentation fault.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=self._device.type != "cpu")
        return get_model_state_dict(self.model, options=whole)

    @torch.no_grad()
    def _evaluate(self) -> float:
        self.model.eval()
        with phase("evaluation"):  # takes no steps, and is no hang
            loss = _over_ranks(self.loss(self._held_out))
        self.model.train()
        return loss

    def finish(self) -> None:
        """Keep the trained weights, and show what the model writes, on rank 0; all ranks call it."""
        weights = self.weights()
        if self._rank:
            return
        if self._offload:
            self.say(f"\n{self._offload.report()}")
        if self._args.weights:
            torch.save(weights, self._args.weights)
        if self._args.sample:
            model = GPT(self._shape)
            model.load_state_dict(weights)
            text = model.generate(b"def ", self._args.sample, self._args.seed)
            self.say("\n" + text.decode(errors="replace"))


def _over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _clip(model: nn.Module, limit: float) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(limit)  # whose gradients do not know that they are shards
    else:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
