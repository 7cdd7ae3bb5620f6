"""Ranks with models on device meshes or in groups of their own ask to save them as one state.

Of two ranks each is a stage. Four are two groups of two, each with a model under FSDP1 of its own.
"""

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from fastckpt import Checkpointer
from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer, StorageType

warnings.filterwarnings("ignore")
GROUPS: list[dist.ProcessGroup] = []
"""Of four ranks: that of this rank first, then the one of its peers in the other groups."""


def under_fsdp1(model: nn.Module, way: str) -> nn.Module:
    """Sharded within its group, alone or as one of the replicas of one model."""
    is_hybrid = way == "hybrid"
    strategy = ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
    kept = {"device_id": torch.device("cpu"), "use_orig_params": way != "flat"}
    return FullyShardedDataParallel(model, tuple(GROUPS) if is_hybrid else GROUPS[0], strategy, **kept)


class Job:
    """Trains a step at a time; ``name`` is that of its layer."""

    def __init__(self, name: str, seed: int, way: str) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential()
        self.model.add_module(name, nn.Linear(4, 4))
        if GROUPS:
            self.model = under_fsdp1(self.model, way)
        elif way != "plain":
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
    """What the stages have: names of layers, seeds, numbers of stages when it is saved and when it is loaded."""

    names: tuple[str, str] = ("0", "0")
    seeds: tuple[int, int] = (0, 1)
    stages: tuple[Any, Any] = (None, None)
    loaded: tuple[Any, Any] | None = None
    way: str = "shards"

    def job(self, rank: int, *, again: bool = False) -> Job:
        return Job(self.names[rank], self.seeds[rank] + 10 * again, self.way)

    def stage(self, rank: int, *, again: bool = False) -> Any:
        return (self.loaded or self.stages)[rank] if again else self.stages[rank]


STAGED: dict[str, Any] = {"stages": (0, "last")}
OF_ALL = {
    "own names": Case(("0", "1")),
    "equal names": Case(),
    "replicas": Case(seeds=(5, 5)),
    "stages": Case(**STAGED),
}
OF_TWO_RANKS = OF_ALL | {
    "plain stages": Case(**STAGED, way="plain"),
    "one stage": Case(stages=(0, None)),
    "a bad stage": Case(stages=("a/b", "a/b")),
    "loaded without": Case(**STAGED, loaded=(None, None)),
    "loaded as others": Case(**STAGED, loaded=(0, 1)),
    "plain, own names": Case(("0", "1"), way="plain"),
    "plain": Case(way="plain"),
}
OF_TWO_GROUPS = OF_ALL | {
    "flat": Case(way="flat"),
    "hybrid": Case(seeds=(5, 5), way="hybrid"),
    "flat stages": Case(**STAGED, way="flat"),
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
    with FsdpShardCheckpointer(folder) as checkpointer:
        checkpointer.load_checkpoint(job.model, job.optimizer)
        job.step()
        return str(checkpointer.save_checkpoint(1, job.model, job.optimizer, storage_type=StorageType.MEMORY).saved)


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


def main() -> None:
    """Write what became of each way with each case to ``said.<rank>``."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for several in ([(0, 1), (2, 3)], [(0, 2), (1, 3)]) if world == 4 else ():
        made = [dist.new_group(list(ranks)) for ranks in several]
        GROUPS.append(next(group for group, ranks in zip(made, several, strict=True) if rank in ranks))
    said: dict[str, str] = {}
    for way in (in_three_lines, by_hand, in_full):
        for name, case in (OF_TWO_GROUPS if GROUPS else OF_TWO_RANKS).items():
            if way is by_hand and name != "plain":
                continue
            if way is in_full and (case.stages[0] is not None or case.loaded or case.way == "plain"):
                continue
            try:
                said[f"{way.__name__}, {name}"] = way(
                    Path(sys.argv[1]) / f"{way.__name__}-{name}", case, rank * 2 // world
                )
            except ConfigError as error:
                said[f"{way.__name__}, {name}"] = str(error)
            dist.barrier()
    (Path(sys.argv[1]) / f"said.{rank}").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
