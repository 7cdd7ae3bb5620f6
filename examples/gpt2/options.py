"""Options of a job, and their effect on each of its steps."""

import argparse
import math

import torch

from fastckpt._core.session import StorageType


def parser(description: str | None, checkpoint_dir: str) -> argparse.ArgumentParser:
    """The options of all ways to train."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
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
    add("--checkpoint_dir", default=checkpoint_dir)
    add("--save_memory_interval", type=int, default=1, help="steps from a save into memory to the next")
    add("--save_storage_interval", type=int, default=100, help="steps from a save to storage to the next")
    add("--offload", default="", metavar="DIR", help="keep activations in this directory on an SSD instead of memory")
    add(
        "--offload_budget",
        default="auto",
        help="activations that may stay in memory, such as 2GiB; the default, auto, finds it",
    )
    add("--log_interval", type=int, default=10)
    add("--eval_interval", type=int, default=50)
    add("--eval_blocks", type=int, default=32, help="blocks per rank in an evaluation")
    add("--sample", type=int, default=300, help="bytes of text to generate at the end")
    add("--losses", default="", help="file to which rank 0 appends one line of JSON per step")
    add("--weights", default="", help="file for the trained weights")
    return made


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Rise to ``peak`` in ``warmup`` steps, then fall to a tenth of it along a cosine; steps count from 1."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def where_to_save(step: int, steps: int, args: argparse.Namespace) -> StorageType | None:
    """Return the storage type of a step: storage now and then and at the end, memory in between; None for neither."""
    if step % args.save_storage_interval == 0 or step == steps:
        return StorageType.DISK
    return StorageType.MEMORY if step % args.save_memory_interval == 0 else None
