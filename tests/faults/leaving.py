"""DDP program of two ranks that one of them leaves, in any way, with any kind of checkpointer.

All ranks take the same batch, so that the state is a function of the step alone, also where each trains by itself. Each
rank appends a line of JSON for all that happens to ``<out>/log.<rank>``, with the digest of its state after each step.
"""

import argparse
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fastckpt import Checkpointer
from fastckpt._core import metrics
from fastckpt.dcp import SharedMemoryReader, SharedMemoryWriter
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, SaveResult, StorageType
from fastckpt.fsdp import FsdpShardCheckpointer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults.diary import Log, digest, parser_of_all

warnings.filterwarnings("ignore")
CLOSES = ("closes-early", "closes-at-another-step")
ENDS = ("returns", "sys-exit-0", "os-exit-0")
"""Ways in which a rank's process ends as if all were well, while the other trains on."""
FAILS = ("raises-before", "raises-in", "raises-after", "sys-exit", "os-exit", "sigterm", "sigkill", "hang")
WAYS = (*ENDS, *CLOSES, *FAILS)
ALONE = ("ddp", "lines")
"""Kinds in which no rank needs the others to train on, if their data are uneven."""

COLLECTIVE = ("dcp", "deepspeed")
"""Kinds in which all ranks must call each save, for it has collectives of theirs."""


class LeavesError(RuntimeError):
    """What a rank raises that leaves so."""


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_all()
    parser.add_argument("--kind", default="ddp", choices=[*KINDS, "trainer"])
    parser.add_argument("--way", default="", choices=["", *WAYS])
    parser.add_argument("--rank", type=int, default=1, help="which one leaves")
    parser.add_argument("--step", type=int, default=5, help="at which it leaves")
    return parser.parse_args()


def local(node: Any) -> Any:
    """What this rank has of a state."""
    if isinstance(node, DTensor):
        return node.to_local()
    if isinstance(node, dict | list | tuple):
        return {key: local(each) for key, each in (node.items() if isinstance(node, dict) else enumerate(node))}
    return node


class Training:
    """A model, and what saves it."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(7)
        self.directory = args.checkpoint_dir
        self.model = self.shard(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        is_together = args.way not in (*ENDS, *CLOSES)
        self.trained = DistributedDataParallel(self.model) if args.kind in ALONE and is_together else self.model
        self.tier = ""
        self.checkpointer = self.make()

    def shard(self, model: nn.Module) -> nn.Module:
        return model

    def make(self) -> Any:
        raise NotImplementedError

    def train(self, step: int) -> None:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        self.trained(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Any:
        return local([self.model.state_dict(), self.optimizer.state_dict()])

    def resume(self) -> int:
        raise NotImplementedError

    def save(self, step: int, place: StorageType) -> SaveResult | None:
        raise NotImplementedError

    def wait(self) -> None:
        self.checkpointer.wait_latest_checkpoint()


class Ddp(Training):
    def make(self) -> Any:
        return DdpCheckpointer(self.directory, KeepLatestStepStrategy(2, self.directory))

    def resume(self) -> int:
        if loaded := self.checkpointer.load_checkpoint():
            self.model.load_state_dict(loaded["model"])
            self.optimizer.load_state_dict(loaded["optimizer"])
        self.tier = self.checkpointer.loaded_from
        return max(0, self.checkpointer.loaded_step)

    def save(self, step: int, place: StorageType) -> SaveResult:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return self.checkpointer.save_checkpoint(step, state, storage_type=place)


class Lines(Training):
    def make(self) -> Any:
        every = {"memory": 1, "storage": 3}
        return Checkpointer(self.directory, model=self.trained, optimizer=self.optimizer, every=every)

    def resume(self) -> int:
        step = self.checkpointer.resume()
        self.tier = self.checkpointer._checkpointer.loaded_from
        return step

    def save(self, step: int, place: StorageType) -> SaveResult | None:
        return self.checkpointer.step(step)

    def wait(self) -> None:
        self.checkpointer._checkpointer.wait_latest_checkpoint()


class Fsdp2(Training):
    def shard(self, model: nn.Module) -> nn.Module:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        return model

    def make(self) -> Any:
        return FsdpShardCheckpointer(self.directory, KeepLatestStepStrategy(2, self.directory))

    def resume(self) -> int:
        self.checkpointer.load_checkpoint(self.model, self.optimizer)
        self.tier = self.checkpointer.loaded_from
        return max(0, self.checkpointer.loaded_step)

    def save(self, step: int, place: StorageType) -> SaveResult:
        return self.checkpointer.save_checkpoint(
            step, storage_type=place, model=self.model, optimizer=self.optimizer, extra_sd={"step": step}
        )


class Dcp(Fsdp2):
    def make(self) -> Any:
        return SharedMemoryWriter(self.directory, KeepLatestStepStrategy(2, self.directory))

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def resume(self) -> int:
        reader = SharedMemoryReader(self.checkpointer)
        if (step := reader.find()) is not None:
            dcp.load({"app": self}, storage_reader=reader)
        self.tier = reader.loaded_from
        return step or 0

    def save(self, step: int, place: StorageType) -> SaveResult:
        self.checkpointer.storage_type = place
        dcp.save({"app": self}, storage_writer=self.checkpointer, checkpoint_id=f"{self.directory}/checkpoint-{step}")
        return self.checkpointer.result

    def wait(self) -> None:
        self.checkpointer.wait()


class DeepSpeed(Training):
    def __init__(self, args: argparse.Namespace) -> None:
        import deepspeed

        from tests.e2e.deepspeed import gloo  # noqa: F401 (for what it does)
        from tests.e2e.deepspeed.engines import config, engine_of

        deepspeed.init_distributed("gloo", verbose=False)
        buckets = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 10**6)  # by default 2 GB
        self._engine_of, self._config = engine_of, config(2, zero_optimization={"stage": 2, **buckets})
        super().__init__(args)

    def make(self) -> Any:
        from fastckpt.deepspeed import DeepSpeedCheckpointer

        self.trained = self._engine_of(self.model, self._config)
        return DeepSpeedCheckpointer(self.trained, self.directory, KeepLatestStepStrategy(2, self.directory))

    def train(self, step: int) -> None:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        self.trained.backward(self.trained(batch).float().square().mean())
        self.trained.step()

    def state(self) -> Any:
        return [self.model.state_dict(), self.trained.optimizer.state_dict()["base_optimizer_state"]]

    def resume(self) -> int:
        self.checkpointer.load_checkpoint(self.directory)
        self.tier = self.checkpointer.loaded_from
        return max(0, self.checkpointer.loaded_step)

    def save(self, step: int, place: StorageType) -> SaveResult:
        return self.checkpointer.save_checkpoint(self.directory, storage_type=place)


KINDS = {"ddp": Ddp, "lines": Lines, "fsdp2": Fsdp2, "dcp": Dcp, "deepspeed": DeepSpeed}


def leave(way: str) -> None:
    """Leave in this way, if it is one that ends what a rank does there and then."""
    if way.startswith("raises"):
        raise LeavesError(way)
    if way.startswith("sys-exit"):
        sys.exit(0 if way.endswith("-0") else 3)
    if way.startswith("os-exit"):
        os._exit(0 if way.endswith("-0") else 3)
    if way.startswith("sig"):
        os.kill(os.getpid(), signal.SIGTERM if way == "sigterm" else signal.SIGKILL)
    if way == "hang":
        time.sleep(600)


def raise_in_save(at: int) -> None:
    def see(phase: str, fields: dict[str, Any]) -> None:
        if phase == "snapshot.fill" and fields.get("step") == at:
            leave("raises-in")

    metrics.observe(see)


def await_departure(out: Path, rank: int) -> None:
    """Wait until a rank has said that it has closed, or has ended."""
    pid = int((out / f"pid.{rank}").read_text())
    while '"left"' not in (out / f"log.{rank}").read_text():
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(0.01)
                continue
        return


def tell(log: Log, step: int, result: SaveResult | None) -> None:
    if result is not None:
        log(**({"saved": step} if result.saved else {"skipped": step, "reason": result.reason}))


def train(args: argparse.Namespace, log: Log) -> None:
    """Train to the end, or until this rank leaves."""
    rank, way = dist.get_rank(), args.way
    training = KINDS[args.kind](args)
    leaves = args.rank == rank and bool(way)
    if leaves and way == "raises-in":
        raise_in_save(args.step)
    is_uneven = args.kind in ALONE and way in (*ENDS, *CLOSES)
    with training.checkpointer as checkpointer:
        step = training.resume()
        log(
            loaded=step, tier=training.tier, state=digest(training.state()), start=[int(os.environ["FAULTS_LAUNCH"]), 0]
        )
        at = 0 if way == "closes-early" else args.step
        while True:
            if step == at and leaves and way in CLOSES:
                checkpointer.close()
                log(left=step)
            if step == at and leaves and way == "returns":
                return
            if step == at and not leaves and way in (*ENDS, *CLOSES):
                await_departure(args.out, args.rank) if is_uneven and way != "closes-at-another-step" else None
            has_closed = leaves and way in CLOSES and step >= at
            if step == args.steps or (has_closed and is_uneven):
                return
            step += 1
            training.train(step)
            log(step=step, state=digest(training.state()))
            if step == args.step and leaves and way == "raises-before":
                leave(way)
            if not has_closed or args.kind in COLLECTIVE:
                place = StorageType.MEMORY if step % args.disk else StorageType.DISK
                tell(log, step, training.save(step, place))
                if place is StorageType.DISK and not way.startswith("closes-at"):
                    training.wait()
            if step == args.step and leaves and way not in ("raises-before", "raises-in"):
                leave(way)
            if is_uneven and step < at and way != "closes-at-another-step":
                dist.barrier()


def main() -> None:
    args = parse_arguments()
    if args.kind == "trainer":
        from tests.faults.leaving_trainer import run

        run(args)
        return
    dist.init_process_group("gloo")
    train(args, Log(args.out, dist.get_rank()))
    if args.way not in ENDS:  # else they do not end together
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
