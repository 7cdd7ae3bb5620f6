"""Mistakes with the data: the loader's arguments, and where its position is kept."""

from pathlib import Path

import torch
from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

from fastckpt.data import ResumableDataLoader
from fastckpt.ddp import StorageType
from fastckpt.errors import ConfigError
from tests.e2e.ddp.conftest import Ranks
from tests.e2e.mistakes.table import WARNING, Noise, Row, Scene, answered, mistakes

ALONE = DistributedSampler(Noise(), num_replicas=1, rank=0)
IN_TURN = {"sampler": RandomSampler(Noise()), "shuffle": True}
mistakes(
    lambda scene, options: ResumableDataLoader(Noise(), **options),
    loader_with_generator=Row(
        {"generator": torch.Generator()}, ConfigError, "generator | its state would not be saved | give seed"
    ),
    loader_typo=Row({"batchsize": 8}, TypeError, "'batchsize' | num_workers | did you mean 'batch_size'?"),
    loader_of_ranks=Row({"sampler": ALONE}, ConfigError, "DistributedSampler | num_replicas | leave the sampler out"),
    loader_without_a_batch=Row({"batch_size": 0}, ConfigError, "batch_size is 0 | 1 or more | give"),
)


@answered(WARNING, "used up | begins with the batch after it | docs/guides/data.md")
def a_look_at_the_first_batch(scene: Scene) -> None:
    loader = ResumableDataLoader(Noise(), batch_size=8)
    next(iter(loader))
    for _ in loader:
        pass


@answered(KeyError, "'data' | rank 1 | common state")
def position_in_the_rank_state(scene: Scene) -> None:
    """README once said: what differs per rank, such as the position in the data, goes into rank_state."""
    loader = ResumableDataLoader(Noise(), batch_size=4)
    job = Ranks(Path(scene.directory), scene.environment)
    try:
        (one,) = job.start(1)
        one.load_checkpoint()
        state = {"weights": torch.zeros(1)}
        one.save_checkpoint(1, state, storage_type=StorageType.DISK, rank_state={"data": loader.state_dict()})
        job.end()
        _, second = job.start(2)
        job.load()
        loader.load_state_dict(second.rank_state["data"])
    finally:
        job.end()


@answered(ConfigError, "'param_groups' | a ResumableDataLoader | give what state_dict()")
def state_of_something_else(scene: Scene) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    ResumableDataLoader(Noise(), batch_size=8).load_state_dict(optimizer.state_dict())
