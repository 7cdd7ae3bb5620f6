"""A small training job for several hosts: DDP, FSDP2 or HSDP, at a pace that leaves time for faults.

Each host appends a line of JSON for all that its workers do to ``<out>/log.<host>``. With ``--batches N`` each step
takes N batches whatever the number of ranks, and does with them bit for bit the same (2 batches on 1 or 2 ranks).
The job ends after the step in which the file ``<out>/stop`` is seen.
"""

import argparse
import gc
import hashlib
import json
import os
import socket
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fastckpt import Checkpointer
from fastckpt.ddp import DdpCheckpointer, StorageType, settle
from fastckpt.fsdp import FsdpShardCheckpointer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--way", choices=("ddp", "fsdp2", "hsdp"), default="ddp")
    parser.add_argument("--saver", choices=("fastckpt", "auto", "torch", "none"), default="fastckpt")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--memory", type=int, default=2, help="save to memory every so many steps")
    parser.add_argument("--disk", type=int, default=50, help="and to storage")
    parser.add_argument("--pace", type=float, default=0.03, help="seconds of rest in each step")
    parser.add_argument("--batches", type=int, default=0, help="of each step, on any number of ranks; 0: one a rank")
    parser.add_argument("--width", type=int, default=32, help="of the model's hidden layer")
    parser.add_argument("--digests", action="store_true", help="log what all ranks together have, saved and loaded")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for a collective")
    return parser.parse_args()


PLACES = (StorageType.MEMORY, StorageType.DISK)


class HostLog:
    """What a worker does, with when and in which place of the job."""

    def __init__(self, out: Path) -> None:
        self._file = os.open(out / f"log.{socket.gethostname()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, what: str, **fields: Any) -> None:
        place = {"pid": os.getpid(), "rank": dist.get_rank(), "world": dist.get_world_size()}
        line = {"at": time.monotonic(), "what": what} | place | fields
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Training:
    """A model, its optimizer, and the steps that they take."""

    def __init__(self, way: str, batches: int, width: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.draws_by_step, self.count = bool(batches), batches or world
        self._mine = range(rank, self.count, world)
        generator = torch.Generator().manual_seed(5)
        self._inputs = torch.randn(256, 16, generator=generator)
        self._targets = torch.randint(4, (256,), generator=generator)
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, 4))
        self._wrapped: nn.Module = self.model
        if way == "fsdp2":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        elif way == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
            fully_shard(self.model, mesh=mesh)
        else:
            self._wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(11 + rank)
        if way == "ddp":
            settle(self._wrapped, lambda: self._backward(0, self._mine[-1]))

    def _backward(self, step: int, batch: int) -> str:
        if self.draws_by_step:
            torch.manual_seed(self.count * step + batch)
        first = 8 * (self.count * step + batch) % 256
        outputs = self._wrapped(self._inputs[first : first + 8])
        loss = nn.functional.cross_entropy(outputs, self._targets[first : first + 8])
        (loss / len(self._mine)).backward()
        return loss.item().hex()

    def digest(self) -> str:
        """A digest of the whole model and its optimizer's state, however they are divided; all ranks call it."""
        found = hashlib.sha256()
        states = [state for parameter in self.model.parameters() for state in [self.optimizer.state[parameter]]]
        for tensor in [*self.model.parameters(), *(each for state in states for each in state.values())]:
            found.update((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().tobytes())
        return found.hexdigest()

    def step(self, number: int) -> dict[int, str]:
        """The losses of this rank's batches."""
        losses = {}
        for batch in self._mine:
            is_last = batch == self._mine[-1]
            with nullcontext() if is_last else self._wrapped.no_sync():
                losses[batch] = self._backward(number, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


class NoSaver:
    """Nothing is saved, and nothing resumed."""

    tier = ""
    checkpointer: Any = None

    def __init__(self, directory: Path, training: Training) -> None:
        self.directory = directory
        self.parts: Any = {"model": training.model, "optimizer": training.optimizer}

    def load(self) -> int:
        return 0

    def save(self, step: int, is_durable: bool) -> str:
        """Why the state was not saved; empty if it was."""
        return ""

    def close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()


class TorchSaver(NoSaver):
    """What a script does by itself: the first rank saves to storage."""

    def found(self) -> dict[str, Any]:
        path = self.directory / "state.pt"
        self.tier = "storage" if path.exists() else ""
        return dict(torch.load(path)) if path.exists() else {}

    def load(self) -> int:
        if not (state := self.found()):
            return 0
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        return int(state["step"])

    def state(self, step: int) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()} | {"step": step}

    def save(self, step: int, is_durable: bool) -> str:
        if is_durable and dist.get_rank() == 0:
            torch.save(self.state(step), self.directory / "state.new")
            (self.directory / "state.new").rename(self.directory / "state.pt")
        return ""


class DdpSaver(TorchSaver):
    def __init__(self, directory: Path, training: Training) -> None:
        super().__init__(directory, training)
        self.checkpointer = DdpCheckpointer(directory)

    def found(self) -> dict[str, Any]:
        state = self.checkpointer.load_checkpoint()
        self.tier = self.checkpointer.loaded_from if state else ""
        return dict(state)

    def save(self, step: int, is_durable: bool) -> str:
        result = self.checkpointer.save_checkpoint(step, self.state(step), storage_type=PLACES[is_durable])
        return "" if result.saved else result.reason


class FsdpSaver(NoSaver):
    def __init__(self, directory: Path, training: Training) -> None:
        super().__init__(directory, training)
        self.checkpointer = FsdpShardCheckpointer(directory)

    def load(self) -> int:
        extra = self.checkpointer.load_checkpoint(**self.parts)
        self.tier = self.checkpointer.loaded_from if extra else ""
        return int(extra["step"]) if extra else 0

    def save(self, step: int, is_durable: bool) -> str:
        options = {"storage_type": PLACES[is_durable], "extra_sd": {"step": step}}
        result = self.checkpointer.save_checkpoint(step, **options, **self.parts)
        return "" if result.saved else result.reason


class AutoSaver(NoSaver):
    """Saves as often as it chooses itself."""

    def __init__(self, directory: Path, training: Training) -> None:
        super().__init__(directory, training)
        self.checkpointer = Checkpointer(directory, **self.parts)

    def load(self) -> int:
        step = self.checkpointer.resume()
        self.tier = self.checkpointer.loaded_from if step else ""
        return int(step)

    def save(self, step: int, is_durable: bool) -> str:
        result = self.checkpointer.step(step)
        return "not due" if result is None else "" if result.saved else result.reason


def saver_of(args: argparse.Namespace, training: Training) -> NoSaver:
    ours = DdpSaver if args.way == "ddp" else FsdpSaver
    kind = {"none": NoSaver, "auto": AutoSaver, "torch": TorchSaver, "fastckpt": ours}[args.saver]
    return kind(args.checkpoint_dir, training)


def sees_stop(out: Path) -> bool:
    """Whether any rank sees the file that ends the job: all get the same answer."""
    seen = torch.tensor(int((out / "stop").exists()))
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return bool(seen)


def train(args: argparse.Namespace) -> None:
    log = HostLog(args.out)
    log("started", restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    training = Training(args.way, args.batches, args.width)
    saver = saver_of(args, training)
    step = saver.load()
    log("loaded", step=step, tier=saver.tier, digest=training.digest() if args.digests and step else "")
    is_over = False
    while step < args.steps and not is_over:
        step += 1
        log("step", step=step, losses=training.step(step))
        if args.saver == "auto" or step % args.memory == 0 or step % args.disk == 0:
            if args.digests:
                log("saving", step=step, digest=training.digest())
            reason = saver.save(step, step % args.disk == 0)
            log("skipped", step=step, reason=reason) if reason else log("saved", step=step)
        is_over = sees_stop(args.out)
        time.sleep(args.pace)
    dist.barrier()
    log("ended", step=step)
    saver.close()


if __name__ == "__main__":
    arguments = parse_arguments()
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout))
    train(arguments)
    # A model that outlived the process group would end it late, while a thread of gloo waits for the GIL.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)
