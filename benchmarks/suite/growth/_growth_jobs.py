"""Jobs whose costs are measured while something grows: a launch that saves and dies, one that resumes and retires."""

import os
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.harness.turn import Turn, record
from benchmarks.suite._limits import bare_write, seconds, warm_copies
from benchmarks.suite._states import many_tensors, storages

SAVES = 5
PERSISTS = 2
LARGEST_COPY = 1 << 30
"""Bytes of the state that are copied beside a save at most: the rest of the memory is needed for its slots."""
SMALL = {"weight": torch.arange(1000.0)}
"""The state of a job that measures what depends on the directory alone."""
LANDED = 0.02
"""Seconds after a save in which the agent does its part of it."""


def even_tensors(gigabytes: float, count: int = 400) -> dict[str, Any]:
    """Return so many tensors of one size."""
    return {f"layer{i}": torch.ones(int(gigabytes * 1e9 / 4 / count)) for i in range(count)}


class Agent:
    """The launcher's process, by whose clock its threads are paid."""

    def __init__(self) -> None:
        launchers = [each for each in psutil.Process().parents() if "fastckpt_run" in each.cmdline()]
        self._clock = (~launchers[-1].pid << 3) | 2  # CPUCLOCK_SCHED of another process, as clock_getcpuclockid gives

    def seconds(self) -> float:
        """Processor time that it has used."""
        return time.clock_gettime(self._clock)


def live(turn: Turn, kind: str, size: float, begun: float) -> None:
    """Save, persist, die, and resume from memory; of a second launch, resume from storage."""
    from fastckpt import DdpCheckpointer

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    is_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    with DdpCheckpointer(turn.folder / "checkpoints") as checkpointer:
        if rank == 0 and not is_restarted:
            record(start=time.time() - begun)
        _together(world)
        took = seconds(checkpointer.load_checkpoint)
        if rank == 0 and checkpointer.loaded_from:
            record(**{f"resume from {checkpointer.loaded_from}": took})
        if not checkpointer.loaded_from:
            _save(turn, checkpointer, _state(kind, size) if rank == 0 else {}, world)
            if rank == 0:
                os._exit(1)  # what is in memory is resumed in the next round
            dist.barrier()


def _state(kind: str, size: float) -> dict[str, Any]:
    return many_tensors(int(size)) if kind == "tensors" else even_tensors(size)


def _together(world: int) -> None:
    if world > 1:
        dist.barrier()


def _save(turn: Turn, checkpointer: Any, state: dict[str, Any], world: int) -> None:
    from fastckpt import StorageType

    checkpointer.prepare(state)
    for step in range(3):
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)  # each slot is used once
    sources, scale = _beginning(storages(state)) if state else ([], 0.0)
    agent = Agent()
    for step in range(3, 3 + SAVES):
        _together(world)
        begun = agent.seconds()
        took = seconds(lambda: checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY))  # noqa: B023
        _together(world)
        time.sleep(LANDED)
        if state:
            used = agent.seconds() - begun
            record(save=took, copy=[scale * each for each in warm_copies(sources, 1)], agent=used)
    for step in range(3 + SAVES, 3 + SAVES + PERSISTS):
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint()
        if state:
            image = max(turn.shm.rglob("model.pt"), key=lambda path: path.stat().st_size)
            record(write=bare_write(image, turn.folder / "limit"))


def _beginning(sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
    """The first of these tensors, and how many times as many bytes all of them have."""
    total = sum(source.numel() for source in sources)
    sizes = accumulate(source.numel() for source in sources)
    part = [source for source, size in zip(sources, sizes, strict=True) if size <= LARGEST_COPY]
    return part, total / sum(source.numel() for source in part)


def visit(turn: Turn, directory: str, keep: int, begun: float) -> None:
    """Resume from a directory, save, and persist some times, while a rule keeps so many checkpoints."""
    from fastckpt import DdpCheckpointer, KeepLatestStepStrategy, StorageType

    agent = Agent()
    with DdpCheckpointer(directory, KeepLatestStepStrategy(keep, directory)) as checkpointer:
        record(start=time.time() - begun)
        record(**{"resume from storage": seconds(checkpointer.load_checkpoint)})
        first = checkpointer.loaded_step + 1

        def persist(step: int) -> None:
            checkpointer.save_checkpoint(step, SMALL, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint()

        record(**{"first persist": seconds(lambda: persist(first))})
        for step in range(first + 1, first + 1 + SAVES):
            used = agent.seconds()
            record(persist=seconds(lambda: persist(step)), agent=agent.seconds() - used)  # noqa: B023


def seed(turn: Turn, directory: str) -> None:
    """Persist one small checkpoint."""
    from fastckpt import DdpCheckpointer, StorageType

    with DdpCheckpointer(Path(directory)) as checkpointer:
        checkpointer.save_checkpoint(1, SMALL, storage_type=StorageType.DISK)
