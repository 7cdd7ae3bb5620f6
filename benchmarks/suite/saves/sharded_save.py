"""Saves and loads of a model that FSDP2 shards, each way in a job of its own, beside bare copies and writes."""

import gc
import os
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.results import Run
from benchmarks.harness.turn import Turn, values_of
from benchmarks.suite._limits import seconds
from benchmarks.suite._training import Training
from benchmarks.suite._way import Saving, Way, nothing
from benchmarks.suite._ways import WAYS as UNSHARDED
from benchmarks.suite._ways import Fastckpt
from benchmarks.suite.saves._rank_saves import local, noted, record_limits, save_by_turns
from benchmarks.suite.saves._ways_table import LIMITS, tabled

RANKS = 2


class FsdpFastckpt(Fastckpt):
    """FsdpShardCheckpointer, given model and optimizer."""

    def open(self) -> None:
        from fastckpt.fsdp import FsdpShardCheckpointer, StorageType

        overlap = self.training.optimizer if self.overlaps else None
        self._sharded, self._types = FsdpShardCheckpointer(self.folder, overlap=overlap), StorageType

    def ready(self) -> None:
        """Leave memory to the first save."""

    def save(self, step: int) -> Saving:
        model, optimizer, place = self.training.model, self.training.optimizer, self._types[self.place]
        result = self._sharded.save_checkpoint(step, model=model, optimizer=optimizer, storage_type=place)
        if not result:
            raise RuntimeError(result.reason)
        return Saving(self._sharded.wait_latest_checkpoint if self.place == "DISK" else None)

    def load(self, step: int) -> list[torch.Tensor]:
        if self.place == "DISK":  # torch reads our files, by the names of its get_state_dict
            state = dict(
                zip(("model", "optimizer"), get_state_dict(self.training.model, self.training.optimizer), strict=True)
            )
            dcp.load(state, checkpoint_id=self.folder / f"checkpoint-{step}")
            return local(state)
        self._sharded.load_checkpoint(self.training.model, self.training.optimizer)
        return local(self.training.state())

    def close(self) -> None:
        self._sharded.close()


class FsdpDisk(FsdpFastckpt):
    """The same, to memory and then to storage."""

    place = "DISK"


class FsdpOverlapped(FsdpFastckpt):
    """Saves to memory, overlapped with the next forward and backward."""

    overlaps = True


class FsdpDiskOverlapped(FsdpDisk):
    """Saves to memory and then to storage, overlapped likewise."""

    overlaps = True


class WriterSave(Way):
    """dcp.save with the writer of fastckpt."""

    def open(self) -> None:
        from fastckpt.dcp import SharedMemoryWriter

        self._writer = SharedMemoryWriter(self.folder)
        self._planner = dcp.DefaultSavePlanner(enable_plan_caching=True)

    def save(self, step: int) -> Saving:
        path = self.folder / f"checkpoint-{step}"
        dcp.save(self.training.state(), checkpoint_id=path, storage_writer=self._writer, planner=self._planner)
        return Saving(self._writer.wait)

    def close(self) -> None:
        self._writer.close()


class RankSave(Way):
    """torch.save and fsync of each rank's part: no checkpoint that another number of ranks could load."""

    def save(self, step: int) -> Saving:
        with (self.folder / f"{step:04}.{dist.get_rank()}").open("wb") as file:
            torch.save(local(self.training.state()), file)
            file.flush()
            os.fsync(file.fileno())
        return Saving(nothing)


DCP = (
    "dcp.save",
    "dcp.async_save, thread",
    "dcp.async_save, thread, cached staging",
    "dcp.async_save, process, shared-memory staging",
    "dcp.async_save, process, overlapped staging",
)
WAYS: dict[str, type[Way]] = {
    "fastckpt MEMORY, overlapped": FsdpOverlapped,
    "fastckpt MEMORY": FsdpFastckpt,
    "fastckpt DISK, overlapped": FsdpDiskOverlapped,
    "fastckpt DISK": FsdpDisk,
    "dcp.save with SharedMemoryWriter": WriterSave,
    "torch.save of each rank": RankSave,
    **{name: UNSHARDED[name] for name in DCP},
}
LOADED = ("fastckpt MEMORY", "fastckpt DISK", "dcp.save")


def sharded(model: Any) -> None:
    """Have each block be a group of FSDP2."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def save_in_turns(turn: Turn, name: str) -> None:
    """The worker: saves of one way, and a load; or the limits."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    training = Training(turn.gigabytes, around=sharded)
    if name == LIMITS:
        record_limits(turn, local(training.state()))
    else:
        (folder := turn.folder / "checkpoints").mkdir(exist_ok=True)
        way = WAYS[name](training, folder)
        last = save_by_turns(training, way)
        for _ in range(3 if name in LOADED else 0):
            gc.collect()
            dist.barrier()
            noted(load=seconds(partial(way.load, last)))
        way.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def measure(name: str, turn: Turn) -> Values:
    """A job of one way."""
    launcher = "fastckpt_run" if "fastckpt" in name or "Writer" in name else "torch.distributed.run"
    records = turn.job(save_in_turns, name, workers=RANKS, launcher=launcher)
    keys = ("blocked", "durable", "first blocked", "copy", "write", "load")
    return {key: values for key in keys if (values := values_of(records, key))}


def table(runs: Sequence[Run]) -> str:
    """The ways, and three loads."""
    loads = {name: Figure(f"a load, {name}", f"{name}.load").values(runs[-1]) for name in LOADED}
    named = ", ".join(f"{name} {values[0]:.3g} s" for name, values in loads.items() if values)
    return tabled(runs, WAYS) + (f"\n\nLoads in the same sharding: {named}." if named else "")


QUICK = {LIMITS, "fastckpt MEMORY, overlapped", "fastckpt DISK", "dcp.async_save, thread"}
THREAD = "dcp.async_save, thread"
BENCHMARK = Benchmark(
    name="sharded_save",
    question="What does a save of a sharded model cost?",
    work=f"GPT-2 with AdamW, FSDP2 over gloo, {RANKS} ranks; the slowest counts.",
    contenders=[Contender(name, partial(measure, name), quick=name in QUICK) for name in (LIMITS, *WAYS)],
    figures=[
        Figure("save to memory : copy", "fastckpt MEMORY.blocked", f"{LIMITS}.copy", Goal("at most", 1.25)),
        Figure(
            "async_save, thread : overlapped save",
            f"{THREAD}.blocked",
            "fastckpt MEMORY, overlapped.blocked",
            Goal("at least", 10),
        ),
        Figure("durable : bare write", "fastckpt DISK.durable", f"{LIMITS}.write", Goal("at most", 1.15)),
    ],
    rounds=1,
    table=table,
)
