"""Ranks with models on device meshes or in groups of their own ask to save them as one state; one gives metrics alone.

Of two ranks each is a stage. Four are two groups of two, each with a model under FSDP1 of its own.
"""

import json
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from fastckpt import Checkpointer
from fastckpt.dcp import shard_plans
from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer, StorageType
from tests.faults.diary import digest
from tests.faults.programs.fsdp import full_state

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
    """What the stages have: names of layers, seeds, numbers of stages when it is saved and when it is loaded.

    Attributes:
        says: Texts between bars, of which each is in what becomes of it; ``second`` is the first rank of the others.
        ways: To save and to load it.
    """

    says: str
    ways: tuple[str, ...] = ("in_three_lines",)
    names: tuple[str, str] = ("0", "0")
    seeds: tuple[int, int] = (0, 1)
    stages: tuple[Any, Any] = (None, None)
    loaded: tuple[Any, Any] | None = None
    kind: str = "shards"

    def job(self, stage: int, *, again: bool) -> Job:
        return Job(self.names[stage], self.seeds[stage] + 10 * again, self.kind)


RESUMED, LAST = "resumed 1, equal: True", (0, "last")
ALL, FULL = ("in_three_lines", "in_full"), ("in_full",)
OF_BOTH = [
    Case("0.weight of rank 0 is not that of rank {second}|pipeline stages|give stage= to", ALL),
    Case(RESUMED, ALL, seeds=(5, 5)),
    Case("rank {second} has another model than rank 0", FULL, ("0", "1")),
    Case("params of rank {second} has other parameters than that of rank 0", names=("0", "1")),
    Case(RESUMED, stages=LAST),
]
CASES = {
    2: [
        *OF_BOTH,
        Case(RESUMED, stages=LAST, kind="plain"),
        Case("give stage= on all ranks, or on none", stages=(0, None)),
        Case("a number, or a word", stages=("a/b", "a/b")),
        Case("has the stages 0, last, and this job no stages", stages=LAST, loaded=(None, None)),
        Case("has the stages 0, last, and this job the stages 0, 1", stages=LAST, loaded=(0, 1)),
        Case("pipeline stages", names=("0", "1"), kind="plain"),
        Case("resumed 1", ("in_three_lines", "by_hand"), kind="plain"),
    ],
    4: [
        *OF_BOTH,
        Case(RESUMED, ALL, seeds=(5, 5), kind="hybrid"),
        Case("0.weight of rank 0 is not that of rank 2", FULL, kind="flat"),
        Case("use_orig_params=True, or use fully_shard", kind="flat"),
        Case("use_orig_params=True, or use fully_shard", stages=LAST, kind="flat"),
    ],
}
"""By the number of ranks."""


def in_three_lines(folder: Path, case: Case, job: Job, stage: int, *, again: bool) -> int:
    stages = (case.loaded or case.stages) if again else case.stages
    options: dict[str, Any] = {"every": 1, "stage": stages[stage]}
    with Checkpointer(folder, model=job.model, optimizer=job.optimizer, **options) as checkpointer:
        step = checkpointer.resume()
        if not again:
            job.step()
            checkpointer.step(1)
        return step


def by_hand(folder: Path, _: Case, job: Job, __: int, *, again: bool, kind: Any = FsdpShardCheckpointer) -> int:
    with kind(folder) as checkpointer:
        checkpointer.load_checkpoint(job.model, job.optimizer)
        if not again:
            job.step()
            assert checkpointer.save_checkpoint(1, job.model, job.optimizer, storage_type=StorageType.MEMORY).saved
        return int(checkpointer.loaded_step)


WAYS = {"in_three_lines": in_three_lines, "by_hand": by_hand, "in_full": partial(by_hand, kind=FsdpFullCheckpointer)}


def outcome(folder: Path, case: Case, way: str, stage: int) -> str:
    try:
        jobs = [case.job(stage, again=again) for again in (False, True)]
        steps = [WAYS[way](folder, case, job, stage, again=again) for again, job in enumerate(jobs)]
    except ConfigError as error:
        return str(error)
    return f"resumed {steps[1]}, equal: {jobs[0].weights() == jobs[1].weights()}"


def with_metrics_of_one_rank(folder: Path) -> str:
    """Of 12 steps, those with a result, and those that were saved; rank 0 alone gives metrics after the 5th."""
    shard_plans.DEADLINE = 2.0
    job, results = Case("").job(0, again=False), {}
    with Checkpointer(folder, model=job.model, optimizer=job.optimizer, every=4) as checkpointer:
        for step in range(checkpointer.resume() + 1, 13):
            job.step()
            own = {"loss": 1.0 / step} if dist.get_rank() == 0 and step > 5 else None
            if (result := checkpointer.step(step, metrics=own)) is not None:
                results[step] = result
    return f"asked {[*results]}, saved {[step for step, result in results.items() if result.saved]}"


def in_a_pipeline(folder: Path) -> tuple[int, str, str, str]:
    """Two steps of two stages, each with two chunks under FSDP2; the step and its tier, and the state before and after.

    Both stages have the same names and shapes, but other groups of parameters, and so schedulers of other states.
    """
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("stages", "data"))
    stage, group = mesh.get_local_rank("stages"), mesh["stages"].get_group()
    torch.manual_seed(7 + stage)
    chunks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(2)]
    model = nn.ModuleList(fully_shard(chunk, mesh=mesh["data"]) for chunk in chunks)
    groups = [[p for p in model.parameters() if (p.dim() > 1) == (many or not stage)] for many in (True, False)]
    optimizer = torch.optim.AdamW([{"params": each} for each in groups] if stage else model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
    stages = [PipelineStage(each, stage + 2 * i, 4, torch.device("cpu"), group=group) for i, each in enumerate(model)]
    schedule = ScheduleInterleaved1F1B(stages, 2, nn.functional.mse_loss)

    def state() -> str:
        return digest([full_state(model, optimizer), scheduler.state_dict()])

    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "stage": stage}
    with Checkpointer(folder, every=1, overlap=False, **parts) as checkpointer:
        first, begun = checkpointer.resume(), state()
        for step in (first + 1, first + 2):
            schedule.step(*[torch.ones(8, 8)] * (not stage), target=torch.ones(8, 8) if stage else None, losses=[])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            assert checkpointer.step(step)
        return first, checkpointer._checkpointer.loaded_from, begun, state()


def main() -> None:
    """Write what became of each case in each way to ``said.<rank>``."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for several in ([(0, 1), (2, 3)], [(0, 2), (1, 3)]) if world == 4 else ():
        made = [dist.new_group(list(ranks)) for ranks in several]
        GROUPS.append(next(group for group, ranks in zip(made, several, strict=True) if rank in ranks))
    out, said = Path(sys.argv[1]), list[Any]()
    for number, case in enumerate(CASES[world]):
        for way in case.ways:
            said.append([number, way, outcome(out / f"{number}-{way}", case, way, rank * 2 // world)])
            dist.barrier()
    metrics = with_metrics_of_one_rank(out / "metrics") if world == 2 else ""
    pipeline = in_a_pipeline(out.with_name("pipeline"))
    (out / f"said.{rank}").write_text(json.dumps([said, metrics, pipeline]))
    dist.barrier()
    if world == 4:
        os.kill(os.getppid(), signal.SIGKILL)  # memory is left
        signal.pause()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
