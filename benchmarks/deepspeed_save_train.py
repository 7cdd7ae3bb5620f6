"""One rank of benchmarks/deepspeed_save.py: a GPT-2 in an engine of DeepSpeed, saved in all ways by turns."""

import argparse
import gc
import json
import os
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger

from benchmarks.fsdp_save_ways import WarmCopy, tensors
from examples.gpt2.model import GPT, GPTConfig
from fastckpt.deepspeed import DeepSpeedCheckpointer, KeepLatestStepStrategy, StorageType, files_of

warnings.filterwarnings("ignore")
logger.setLevel("WARNING")

COPY, STOCK = "bare copy into warm memory", "DeepSpeed's save_checkpoint"
MEMORY, DISK = "fastckpt, to memory", "fastckpt, to storage"
Seconds = dict[str, float]


def started(gigabytes: float) -> deepspeed.DeepSpeedEngine:
    """A GPT-2 of 12 layers in ZeRO 2 with AdamW: 16 bytes for each parameter, 12 of them shared out to all ranks."""
    torch.manual_seed(0)
    width = max(1, round((gigabytes / 1.98) ** 0.5 * 12)) * 64
    model = GPT(GPTConfig(vocab_size=50257, n_layer=12, n_head=width // 64, n_embd=width, dropout=0.0))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: deepspeed.DeepSpeedEngine) -> None:
    """Forward and backward of one short sequence, and the optimizer's step: all of the state changes."""
    engine.backward(engine(torch.randint(50257, (1, 8))).float().logsumexp(-1).mean())
    engine.step()


class Ways:
    """Saves of one engine. Each returns seconds from its begin on this rank: by "durable", when what was saved is."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, checkpointer: DeepSpeedCheckpointer, folder: Path) -> None:
        self._engine, self._checkpointer = engine, checkpointer
        self.ours, self.stocks = folder / "ours", folder / "stock"
        scratch = folder / f"scratch.{dist.get_rank()}"
        scratch.mkdir()
        state = files_of(engine, scratch, "scratch", {})
        self.bytes = sum(tensor.nbytes for tensor in tensors(state))
        self._copy = WarmCopy(state, 1)
        self.all: dict[str, Callable[[], Seconds]] = {
            COPY: self.copy,
            STOCK: self.stock,
            MEMORY: lambda: self.save(StorageType.MEMORY),
            DISK: lambda: self.save(StorageType.DISK),
        }

    def copy(self) -> Seconds:
        begin = time.perf_counter()
        self._copy.save(0)
        return {"blocked": time.perf_counter() - begin}

    def stock(self) -> Seconds:
        """DeepSpeed syncs nothing; then each rank syncs the files, of which the kernel writes each page once."""
        begin = time.perf_counter()
        self._engine.save_checkpoint(str(self.stocks), tag="stock")
        blocked = time.perf_counter() - begin
        for path in [*(self.stocks / "stock").iterdir(), self.stocks / "stock", self.stocks]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return {"blocked": blocked, "durable": time.perf_counter() - begin}

    def save(self, place: StorageType) -> Seconds:
        begin = time.perf_counter()
        result = self._checkpointer.save_checkpoint(self.ours, storage_type=place)
        blocked = time.perf_counter() - begin
        if not result.saved:
            raise RuntimeError(f"not saved: {result.reason}")
        if place is StorageType.MEMORY:
            return {"blocked": blocked}
        self._checkpointer.wait_latest_checkpoint()
        return {"blocked": blocked, "durable": time.perf_counter() - begin}

    def forget(self) -> None:
        """Leave nothing for the next way to wait for."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.stocks, ignore_errors=True)
            os.sync()
        dist.barrier()

    def differing(self) -> list[str]:
        """Files of DeepSpeed's own save whose contents ours differ from, saved of the same state; on all ranks."""
        self.stock()
        self.save(StorageType.DISK)
        dist.barrier()
        ours = self.ours / (self.ours / "latest").read_text()
        return [path.name for path in (self.stocks / "stock").iterdir() if not alike(path, ours / path.name)]


def alike(one: Path, other: Path) -> bool:
    """Return whether all tensors of two files are equal, bit for bit."""
    left, right = (list(tensors(torch.load(path, weights_only=False))) for path in (one, other))
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def slowest(measured: Seconds) -> Seconds:
    """The greatest of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, measured)
    return {name: max(each[name] for each in found) for name in measured}


def measure(args: argparse.Namespace) -> None:
    """Do all ways by turns, as often as is asked for and time allows, and write what was measured."""
    end = time.monotonic() + args.seconds
    engine = started(args.gigabytes)
    step(engine)  # an optimizer has no state before
    strategy = KeepLatestStepStrategy(1, args.folder / "ours")
    with DeepSpeedCheckpointer(engine, args.folder / "ours", strategy) as checkpointer:
        ways = Ways(engine, checkpointer, args.folder)
        seconds: dict[str, list[Seconds]] = defaultdict(list)
        for turn in range(args.repeats + 1):
            for name in list(ways.all)[turn % len(ways.all) :] + list(ways.all)[: turn % len(ways.all)]:
                step(engine)
                ways.forget()
                seconds[name].append(slowest(ways.all[name]()))
            enough = torch.tensor([float(time.monotonic() > end)])
            dist.all_reduce(enough)
            if enough:
                break
        total = torch.tensor([ways.bytes])
        dist.all_reduce(total)
        ways.forget()
        differing = ways.differing()
    about = {"ranks": dist.get_world_size(), "bytes": int(total), "differing": differing}
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps({"about": about, "ways": seconds}))
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    measure(args)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
