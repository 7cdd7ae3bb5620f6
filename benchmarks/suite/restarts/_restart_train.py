"""The training that the benchmark restart kills: the example's GPT-2 under DDP; one of several savers keeps its state.

Each rank appends a line of JSON to ``<out>/stamps.<rank>`` at the end of each stage of its start, and for each step.
"""

# ruff: noqa: E402
import time

BEGIN = time.monotonic()

import argparse
import contextlib
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.gpt2.model import GPT, GPTConfig

SHAPES = {
    "tiny": {"vocab_size": 256, "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128},
    "compiled": {"vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 128, "block_size": 128},
    "0.5": {"vocab_size": 32000, "n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 128},
    "1.5": {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 128},
}
"""tiny is the size of `make demo`, compiled a quarter of it; the others give so many GB of state with AdamW in fp32."""
TOKENS = 32
State = dict[str, Any]


class TorchSave:
    """Saves as scripts for torchrun do: rank 0 writes a file and renames it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / "checkpoint.pt"

    def load(self) -> State:
        return torch.load(self._path) if self._path.exists() else {}

    def save(self, step: int, state: State) -> bool:
        if dist.get_rank() == 0:
            torch.save(state, self._path.with_suffix(".tmp"))
            self._path.with_suffix(".tmp").rename(self._path)
        return True


class Fastckpt:
    """Memory, by way of fastckpt-run."""

    def __init__(self, folder: Path) -> None:
        from fastckpt.ddp import DdpCheckpointer, StorageType

        self._checkpointer = DdpCheckpointer(folder)
        self._memory = StorageType.MEMORY

    def load(self) -> State:
        return self._checkpointer.load_checkpoint()

    def save(self, step: int, state: State) -> bool:
        return self._checkpointer.save_checkpoint(step, state, storage_type=self._memory).saved


class DLRover:
    """DLRover's Flash Checkpoint: memory, by way of dlrover-run."""

    def __init__(self, folder: Path) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        folder.mkdir(exist_ok=True)
        self._checkpointer = DdpCheckpointer(str(folder), local_shard_num=1, global_shard_num=1)
        self._memory = StorageType.MEMORY

    def load(self) -> State:
        # Its tensors are in shared memory: an optimizer that was given them would train on what is saved there.
        return copied(self._checkpointer.load_checkpoint())

    def save(self, step: int, state: State) -> bool:
        dist.barrier()
        self._checkpointer.save_checkpoint(step, state, storage_type=self._memory)
        return True


SAVERS: dict[str, Callable[[Path], Any]] = {"torch": TorchSave, "fastckpt": Fastckpt, "dlrover": DLRover}

MODULES = {"fastckpt": "fastckpt.ddp", "dlrover": "dlrover.trainer.torch.flash_checkpoint.ddp"}
"""Imports of a saver; a part of the start, not of the load."""


def copied(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.clone()
    if isinstance(node, dict):
        return {key: copied(value) for key, value in node.items()}
    return [copied(value) for value in node] if isinstance(node, list) else node


class Stamps:
    """Steps of this rank, and their times (seconds of the monotonic clock, which all processes share)."""

    def __init__(self, out: Path, rank: int) -> None:
        self._file = os.open(out / f"stamps.{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._fields = {"pid": os.getpid(), "rank": rank}

    def __call__(self, what: str, at: float | None = None, **fields: Any) -> None:
        line = self._fields | {"what": what, "at": at or time.monotonic(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


Training = tuple[GPT, DistributedDataParallel, torch.optim.Optimizer]


def build(shape: GPTConfig, loaded: State) -> Training:
    """The model and what trains it, as torch recommends it for a state that is there already.

    Weights that would be replaced are neither drawn, nor copied, nor sent to the other ranks, which have the same.
    """
    torch.manual_seed(0)
    with torch.device("meta") if loaded else contextlib.nullcontext():
        model = GPT(shape)
    if loaded:
        model.load_state_dict(loaded["model"], assign=True)
    ddp = DistributedDataParallel(model, init_sync=not loaded, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), 1e-4, fused=True)
    if loaded:
        optimizer.load_state_dict(loaded["optimizer"])
    return model, ddp, optimizer


def train(args: argparse.Namespace, stamp: Stamps) -> None:
    rank, shape = dist.get_rank(), GPTConfig(**SHAPES[args.size])
    saver = SAVERS[args.saver](args.out / "checkpoints")
    loaded = saver.load()
    step = loaded.get("step", 0)
    stamp("load", step=step)
    model, ddp, optimizer = build(shape, loaded)
    del loaded
    if args.compile:
        ddp = torch.compile(ddp)
    stamp("model")
    stop = torch.zeros(())
    while not stop and step < args.steps:
        step += 1
        torch.manual_seed(1000 * step + rank)  # of dropout and data: they need no saving
        text = torch.randint(shape.vocab_size, (args.batch, TOKENS + 1))
        loss = functional.cross_entropy(ddp(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        together = torch.stack([loss.detach(), torch.tensor(float((args.out / "stop").exists() and rank == 0))])
        dist.all_reduce(together)
        stamp("step", step=step, loss=together[0].item().hex())
        stop = together[1]
        if step % args.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if saver.save(step, state):
                stamp("saved", step=step)
            del state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saver", choices=SAVERS, required=True)
    parser.add_argument("--size", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="train what torch.compile makes of the model")
    args = parser.parse_args()
    stamp = Stamps(args.out, int(os.environ["RANK"]))
    stamp("script", BEGIN)
    if args.saver in MODULES:
        importlib.import_module(MODULES[args.saver])
    stamp("imports")
    dist.init_process_group("gloo")
    stamp("group")
    train(args, stamp)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
