"""Two ranks, each with a model on a device mesh of its own, ask to save them as one state."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastckpt import Checkpointer
from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer, StorageType


class Job:
    """Trains a step at a time; ``name`` is that of its layer."""

    def __init__(self, name: str, seed: int, plain: bool) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential()
        self.model.add_module(name, nn.Linear(4, 4))
        if not plain:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))["shards"])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[list[float]]:
        return [getattr(each, "_local_tensor", each).flatten().tolist() for each in self.model.parameters()]


@dataclass
class Case:
    """What the two ranks have: names of layers, seeds, stages when it is saved and when it is loaded."""

    names: tuple[str, str] = ("0", "0")
    seeds: tuple[int, int] = (0, 1)
    stages: tuple[Any, Any] = (None, None)
    loaded: tuple[Any, Any] | None = None
    plain: bool = False

    def job(self, rank: int, *, again: bool = False) -> Job:
        return Job(self.names[rank], self.seeds[rank] + 10 * again, self.plain)

    def stage(self, rank: int, *, again: bool = False) -> Any:
        return (self.loaded or self.stages)[rank] if again else self.stages[rank]


STAGED: dict[str, Any] = {"stages": (0, "last")}
CASES = {
    "own names": Case(("0", "1")),
    "equal names": Case(),
    "replicas": Case(seeds=(5, 5)),
    "stages": Case(**STAGED),
    "plain stages": Case(**STAGED, plain=True),
    "one stage": Case(stages=(0, None)),
    "a bad stage": Case(stages=("a/b", "a/b")),
    "loaded without": Case(**STAGED, loaded=(None, None)),
    "loaded as others": Case(**STAGED, loaded=(0, 1)),
    "loaded with": Case(seeds=(5, 5), loaded=(0, 0)),
    "plain, own names": Case(("0", "1"), plain=True),
    "plain": Case(plain=True),
}


def in_three_lines(folder: Path, case: Case, rank: int) -> str:
    job = case.job(rank)
    options: dict[str, Any] = {"every": 1, "stage": case.stage(rank)}
    with Checkpointer(folder, model=job.model, optimizer=job.optimizer, **options) as checkpointer:
        checkpointer.resume()
        job.step()
        checkpointer.step(1)
    again = case.job(rank, again=True)
    options["stage"] = case.stage(rank, again=True)
    with Checkpointer(folder, model=again.model, optimizer=again.optimizer, **options) as checkpointer:
        return f"resumed {checkpointer.resume()}, equal: {again.weights() == job.weights()}"


def by_hand(folder: Path, case: Case, rank: int) -> str:
    job = case.job(rank)
    extra = {"numbers": {1: rank}, "text": "x" * rank}
    with FsdpShardCheckpointer(folder, stage=case.stage(rank)) as checkpointer:
        checkpointer.load_checkpoint(job.model, job.optimizer)
        job.step()
        place = StorageType.MEMORY
        checkpointer.save_checkpoint(1, job.model, job.optimizer, extra, storage_type=place)
    again = case.job(rank, again=True)
    with FsdpShardCheckpointer(folder, stage=case.stage(rank, again=True)) as checkpointer:
        equal = checkpointer.load_checkpoint(again.model, again.optimizer) == extra or case.stage(rank) is None
        return f"resumed {checkpointer.loaded_step}, equal: {again.weights() == job.weights() and equal}"


def in_full(folder: Path, case: Case, rank: int) -> str:
    job = case.job(rank)
    with FsdpFullCheckpointer(folder) as checkpointer:
        checkpointer.load_checkpoint(job.model, job.optimizer)
        job.step()
        checkpointer.save_checkpoint(1, job.model, job.optimizer, storage_type=StorageType.MEMORY)
    again = case.job(rank, again=True)
    with FsdpFullCheckpointer(folder) as checkpointer:
        checkpointer.load_checkpoint(again.model, again.optimizer)
        return f"resumed {checkpointer.loaded_step}, equal: {again.weights() == job.weights()}"


def attempt_all(attempts: Iterable[tuple[Callable[..., str], str, Any, int]]) -> None:
    """Write what became of each (way, name of the case, the case, number of the stage) to ``said.<rank>``."""
    said: dict[str, str] = {}
    for way, name, case, stage in attempts:
        try:
            said[f"{way.__name__}, {name}"] = way(Path(sys.argv[1]) / f"{way.__name__}-{name}", case, stage)
        except ConfigError as error:
            said[f"{way.__name__}, {name}"] = str(error)
        dist.barrier()
    (Path(sys.argv[1]) / f"said.{dist.get_rank()}").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    dist.init_process_group("gloo")
    cases = list(CASES.items())
    ways = ((in_three_lines, cases), (by_hand, cases), (in_full, cases[:3]))
    attempt_all((way, *each, dist.get_rank()) for way, some in ways for each in some)


if __name__ == "__main__":
    main()
