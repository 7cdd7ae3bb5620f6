"""Train GPT-2 with DDP, saving its state into shared memory as often as every step.

    fastckpt-run --standalone --nproc_per_node=2 --max-restarts=3 examples/ddp_gpt2/train.py --max_steps 200

Kill a worker: the others restart with it and continue from memory, bit for bit as if nothing had happened.
"""

import argparse
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# A launcher runs this file as a script, so its neighbours are found by their bare names.
from data import Batch, ShuffledBatches, read_text, split, validation_batch
from fastckpt import metrics
from fastckpt.ddp import DdpCheckpointer, StorageType, phase, settle
from model import GPT, GPTConfig
from progress import Progress


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--n_layer", type=int, default=6)
    add("--n_head", type=int, default=6)
    add("--n_embd", type=int, default=384)
    add("--block_size", type=int, default=256, help="tokens that the model sees at once")
    add("--dropout", type=float, default=0.1)
    add("--data_dir", default="", help="directory of text files; default: Python's standard library")
    add("--batch_size", type=int, default=16, help="blocks per rank and step")
    add("--epochs", type=int, default=1)
    add("--max_steps", type=int, default=0, help="steps in all; default: as many as the epochs take")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=20, help="steps until the learning rate is reached")
    add("--weight_decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="limit of the gradient's norm")
    add("--seed", type=int, default=1337)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--checkpoint_dir", default="runs/ddp_gpt2")
    add("--save_memory_interval", type=int, default=1, help="steps from a save into memory to the next")
    add("--save_storage_interval", type=int, default=100, help="steps from a save to storage to the next")
    add("--log_interval", type=int, default=10)
    add("--eval_interval", type=int, default=50)
    add("--eval_blocks", type=int, default=32, help="blocks per rank in an evaluation")
    add("--sample", type=int, default=300, help="bytes of text to generate at the end")
    add("--losses", default="", help="file to which rank 0 appends one line of JSON per step")
    add("--weights", default="", help="file for the trained weights")
    return parser.parse_args(arguments)


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Rise to ``peak`` in ``warmup`` steps, then fall to a tenth of it along a cosine; steps count from 1."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def where_to_save(step: int, steps: int, args: argparse.Namespace) -> StorageType | None:
    if step % args.save_storage_interval == 0 or step == steps:
        return StorageType.DISK
    return StorageType.MEMORY if step % args.save_memory_interval == 0 else None


def start_process_group(kind: str) -> torch.device:
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may sum in another order
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def mean_loss(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    tokens, targets = (part.to(device) for part in batch)
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch, device: torch.device) -> float:
    model.eval()
    with phase("evaluation"):  # takes no steps, and is no hang
        loss = over_ranks(mean_loss(model, batch, device))
    model.train()
    return loss


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, validation = split(read_text(args.data_dir), args.block_size)
    batches = ShuffledBatches(training, args.block_size, args.batch_size, rank, world_size, args.seed)
    held_out = validation_batch(validation, args.block_size, args.eval_blocks, rank, world_size)
    steps = args.max_steps or args.epochs * batches.steps_per_epoch

    torch.manual_seed(args.seed)
    shape = GPTConfig(256, args.block_size, args.n_layer, args.n_head, args.n_embd, args.dropout)
    model = GPT(shape).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameter_groups(args.weight_decay), args.lr, (0.9, 0.95), fused=True)
    torch.manual_seed(args.seed + 1 + rank)  # each rank drops out other activations

    def state(step: int) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": batches}
        return {"step": step} | {name: part.state_dict() for name, part in parts.items()}

    progress, step = Progress(rank, steps, args.log_interval, args.losses), 0
    with DdpCheckpointer(args.checkpoint_dir) as checkpointer:
        settle(ddp, lambda: mean_loss(ddp, batches.peek(), device).backward())
        checkpointer.prepare(state(step), optimizer)
        if loaded := checkpointer.load_checkpoint():
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            batches.load_state_dict(loaded["batches"])
            step = loaded["step"]
            progress.say(f"resumed at step {step} from {checkpointer.loaded_from}")

        while step < steps:
            step += 1
            lr = learning_rate(step, steps, args.warmup, args.lr)
            loss = train_step(ddp, optimizer, mean_loss(ddp, batches.take(), device), lr, args.clip)
            evaluates = step % args.eval_interval == 0 or step == steps
            held_out_loss = evaluate(model, held_out, device) if evaluates else None
            progress.step(step, over_ranks(loss), lr, held_out_loss)
            metrics.event("step", step=step, rank=rank)

            if place := where_to_save(step, steps, args):
                result = checkpointer.save_checkpoint(step, state(step), storage_type=place)
                if not result.saved:
                    progress.say(f"step {step} was not saved: {result.reason}")
        checkpointer.wait_latest_checkpoint()
    finish(args, model, progress)


def train_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, lr: float, clip: float) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss.backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def finish(args: argparse.Namespace, model: GPT, progress: Progress) -> None:
    if dist.get_rank():
        return
    if args.weights:
        torch.save(model.state_dict(), args.weights)
    if args.sample:
        progress.say("\n" + model.generate(b"def ", args.sample, args.seed).decode(errors="replace"))


def main() -> None:
    args = parse_arguments()
    train(args, start_process_group(args.device))  # its model must not outlive the process group: gloo may hang then
    dist.barrier()  # gloo aborts a rank whose peer has closed its connections already
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
