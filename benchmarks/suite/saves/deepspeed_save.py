"""Saves of a DeepSpeed engine, beside DeepSpeed's own and the bare copy."""

import os
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Values
from benchmarks.harness.turn import Turn, values_of
from benchmarks.suite._states import gpt2, tensors
from benchmarks.suite._way import Saving, Way
from benchmarks.suite.saves._rank_saves import record_limits, save_by_turns
from benchmarks.suite.saves._ways_table import LIMITS

RANKS = 2
STOCK, MEMORY, DISK = "save_checkpoint", "fastckpt MEMORY", "fastckpt DISK"


class Engine:
    """A GPT-2 in ZeRO 2 with AdamW, whose steps can be interrupted by saves: 16 bytes for each parameter."""

    waited = 0.0

    def __init__(self, gigabytes: float) -> None:
        import deepspeed

        # Over gloo, without kernels of its own that it would first compile for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = gpt2(gigabytes * 0.75, dropout=0.0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
            "steps_per_print": 10**9,
        }
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self.backward()
        self.update()

    def backward(self) -> None:
        """Forward and backward of one short sequence."""
        self.engine.backward(self.engine(torch.randint(50257, (1, 8))).float().logsumexp(-1).mean())

    def update(self) -> None:
        """The optimizer's step."""
        self.engine.step()


class Stock(Way):
    """DeepSpeed's own save, after which each rank syncs all files: the kernel writes each page once."""

    def save(self, step: int) -> Saving:
        self.training.engine.save_checkpoint(str(self.folder), tag=self.path(step).name)
        return Saving(partial(self._sync, self.path(step)))

    def _sync(self, folder: Path) -> None:
        for path in [*folder.iterdir(), folder, self.folder]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


class Memory(Way):
    """DeepSpeedCheckpointer, to memory."""

    place = "MEMORY"

    def open(self) -> None:
        from fastckpt.deepspeed import DeepSpeedCheckpointer, KeepLatestStepStrategy, StorageType

        self._type = StorageType[self.place]
        strategy = KeepLatestStepStrategy(1, self.folder)
        self._checkpointer = DeepSpeedCheckpointer(self.training.engine, self.folder, strategy)

    def save(self, step: int) -> Saving:
        result = self._checkpointer.save_checkpoint(self.folder, storage_type=self._type)
        if not result:
            raise RuntimeError(result.reason)
        return Saving(self._checkpointer.wait_latest_checkpoint if self.place == "DISK" else None)

    def remove(self, step: int) -> None:
        """Leave that to the strategy."""

    def close(self) -> None:
        self._checkpointer.close()


class Disk(Memory):
    """The same, to memory and then to storage."""

    place = "DISK"


WAYS: dict[str, type[Way]] = {STOCK: Stock, MEMORY: Memory, DISK: Disk}


def save_in_turns(turn: Turn, name: str) -> None:
    """The worker: saves of one way, or the limits."""
    import deepspeed

    warnings.filterwarnings("ignore")
    deepspeed.utils.logger.setLevel("WARNING")
    dist.init_process_group("gloo")
    training, folder = Engine(turn.gigabytes), turn.folder / "checkpoints"
    if name == LIMITS:
        from fastckpt.deepspeed import files_of

        (scratch := turn.folder / f"scratch.{dist.get_rank()}").mkdir()
        record_limits(turn, tensors(files_of(training.engine, scratch, "scratch", {})))
    else:
        way = WAYS[name](training, folder)
        save_by_turns(training, way)
        way.close()
    training.engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, turn: Turn) -> Values:
    """A job of one way."""
    records = turn.job(save_in_turns, name, workers=RANKS)
    keys = ("blocked", "durable", "first blocked", "copy", "write")
    return {key: values for key in keys if (values := values_of(records, key))}


def missing() -> str:
    """The reason for which it cannot run here."""
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        return "deepspeed is not installed"
    return ""


BENCHMARK = Benchmark(
    name="deepspeed_save",
    question="What does a save of a DeepSpeed engine cost?",
    work=f"GPT-2 with AdamW in ZeRO 2, {RANKS} ranks; the slowest counts.",
    contenders=[Contender(name, partial(measure, name), missing) for name in (LIMITS, *WAYS)],
    figures=[
        Figure("a copy into warm memory", f"{LIMITS}.copy"),
        *(Figure(f"{name}: blocked", f"{name}.blocked") for name in WAYS),
        Figure("save to memory : copy", f"{MEMORY}.blocked", f"{LIMITS}.copy"),
        Figure(f"save to memory : {STOCK}", f"{MEMORY}.blocked", f"{STOCK}.blocked"),
        Figure("durable", f"{DISK}.durable"),
        Figure(f"durable : {STOCK}", f"{DISK}.durable", f"{STOCK}.durable"),
    ],
    rounds=1,
    gigabytes=1.0,
)
