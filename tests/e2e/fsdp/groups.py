"""Two groups of two ranks, each with a model under FSDP1 of its own, ask to save them as one state."""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.e2e.fsdp import stages

warnings.filterwarnings("ignore")
GROUPS: list[dist.ProcessGroup] = []
"""That of this rank first, then the one of its peers in the other groups."""


class Job(stages.Job):
    """Trains a step at a time; sharded within its group, alone or as one of the replicas of one model."""

    def __init__(self, name: str, seed: int, way: str) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential()
        model.add_module(name, nn.Linear(4, 4))
        strategy = ShardingStrategy.HYBRID_SHARD if way == "hybrid" else ShardingStrategy.FULL_SHARD
        strategy = ShardingStrategy.NO_SHARD if way == "no shards" else strategy
        group = tuple(GROUPS) if way == "hybrid" else GROUPS[0]
        kept = {"device_id": torch.device("cpu"), "use_orig_params": way != "flat"}
        self.model = FullyShardedDataParallel(model, group, strategy, **kept)
        self.optimizer = torch.optim.AdamW(self.model.parameters())


@dataclass
class Case(stages.Case):
    """What the two groups have."""

    way: str = "shards"

    def job(self, rank: int, *, again: bool = False) -> Job:
        return Job(self.names[rank], self.seeds[rank] + 10 * again, self.way)


CASES = {
    "own names": Case(("0", "1")),
    "equal names": Case(),
    "flat": Case(way="flat"),
    "no shards": Case(way="no shards"),
    "replicas": Case(seeds=(5, 5)),
    "hybrid": Case(seeds=(5, 5), way="hybrid"),
    "stages": Case(**stages.STAGED),
    "stages, own names": Case(("0", "1"), **stages.STAGED),
    "flat stages": Case(**stages.STAGED, way="flat"),
}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for several in ([(0, 1), (2, 3)], [(0, 2), (1, 3)]):
        made = [dist.new_group(list(ranks)) for ranks in several]
        GROUPS.append(next(group for group, ranks in zip(made, several, strict=True) if rank in ranks))
    ways = (stages.in_three_lines, stages.by_hand, stages.in_full)
    stages.attempt_all(
        (way, *each, rank // 2)
        for way in ways
        for each in CASES.items()
        if way is not stages.in_full or each[1].stages[0] is None
    )


if __name__ == "__main__":
    main()
