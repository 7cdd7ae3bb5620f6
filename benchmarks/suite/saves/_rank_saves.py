"""Saves of several ranks that train together: the slowest rank counts."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.harness.turn import Turn, record
from benchmarks.suite._limits import bare_write, copy, seconds, torch_threads, warm_memory
from benchmarks.suite._states import storages, tensors
from benchmarks.suite._way import Way

UNCOUNTED, LATER = 3, 4
"""Saves after the first one, until memory of all slots and stagers was used once; and those that count then."""


class Trained(Protocol):
    """Work of a rank, by halves of a step.

    Attributes:
        waited: Seconds that the last update waited for a save.
    """

    waited: float

    def backward(self) -> None:
        """Forward and backward."""

    def update(self) -> None:
        """The optimizer's step."""


def local(state: Any) -> list[torch.Tensor]:
    """This rank's part of the tensors of a state."""
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors(state)]


def all_ranks(values: dict[str, float]) -> dict[str, float]:
    """The greatest value of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return {name: max(each[name] for each in found) for name in values}


def noted(**values: float) -> None:
    """Record the slowest rank's values, once."""
    slowest = all_ranks(values)
    if dist.get_rank() == 0:
        record(**slowest)


def save_by_turns(training: Trained, way: Way) -> int:
    """Saves, each within a step; returns the last one, which is left on storage."""
    way.ready()
    last = 1 + UNCOUNTED + LATER
    for step in range(1, last + 1):
        training.backward()
        training.update()
        dist.barrier()
        begin = time.perf_counter()
        saving = way.save(step)
        blocked = time.perf_counter() - begin
        training.backward()
        blocked += seconds(saving.staged)
        training.update()
        found = {"blocked": blocked + training.waited}
        if saving.durable is not None:
            saving.durable()
            found["durable"] = time.perf_counter() - begin
        if step > 1 + UNCOUNTED:
            noted(**found)
        elif step == 1:
            noted(**{f"first {name}": value for name, value in found.items()})
        dist.barrier()
        if dist.get_rank() == 0 and step < last:
            way.remove(step)
    return last


def record_limits(turn: Turn, sources: Sequence[torch.Tensor]) -> None:
    """Copies into warm shared memory and bare writes of as many bytes, by all ranks at once."""
    images = storages(list(sources))
    with warm_memory(images) as targets, torch_threads(max(1, torch.get_num_threads() // dist.get_world_size())):
        for number in range(LATER + 1):
            dist.barrier()
            took = seconds(partial(copy, targets, images))
            if number:
                noted(copy=took)
        path = turn.shm / f"image.{dist.get_rank()}"
        with path.open("wb") as file:
            file.writelines(chain(each.numpy() for each in targets))
            file.truncate(-(-file.tell() // 4096) * 4096)  # O_DIRECT writes whole blocks
    for _ in range(LATER):
        dist.barrier()
        noted(write=bare_write(path, turn.folder / f"bare.{dist.get_rank()}"))
    path.unlink()
