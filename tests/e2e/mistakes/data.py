"""Mistakes with the data: the loader's arguments, and where its position is kept."""

from pathlib import Path

import torch
from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

from fastckpt.data import ResumableDataLoader
from fastckpt.ddp import StorageType
from fastckpt.errors import ConfigError
from tests.e2e.ddp.conftest import Ranks
from tests.e2e.mistakes.table import WARNING, Noise, Scene, answered


@answered(ConfigError, value="a sampler", limit="decides the order", remedy="leave shuffle")
def loader_with_sampler_and_shuffle(scene: Scene) -> None:
    ResumableDataLoader(Noise(), batch_size=8, shuffle=True, sampler=RandomSampler(Noise()))


@answered(ConfigError, value="generator", limit="its state would not be saved", remedy="give seed")
def loader_with_generator(scene: Scene) -> None:
    ResumableDataLoader(Noise(), batch_size=8, generator=torch.Generator())


@answered(TypeError, value="'batchsize'", limit="num_workers", remedy="did you mean 'batch_size'?")
def loader_typo(scene: Scene) -> None:
    ResumableDataLoader(Noise(), batchsize=8)


@answered(ConfigError, value="DistributedSampler", limit="num_replicas", remedy="leave the sampler out")
def loader_with_distributed_sampler(scene: Scene) -> None:
    sampler = DistributedSampler(Noise(), num_replicas=1, rank=0)
    ResumableDataLoader(Noise(), batch_size=8, sampler=sampler)


@answered(ConfigError, value="batch_size is 0", limit="1 or more", remedy="give")
def loader_without_a_batch(scene: Scene) -> None:
    ResumableDataLoader(Noise(), batch_size=0)


@answered(ConfigError, value="seeding is 'samples'", limit="'batch' or 'none'", remedy="did you mean 'sample'?")
def loader_seeding_typo(scene: Scene) -> None:
    ResumableDataLoader(Noise(), seeding="samples")


@answered(ConfigError, value="accumulate is 0", limit="1 or more", remedy="give")
def loader_that_accumulates_nothing(scene: Scene) -> None:
    ResumableDataLoader(Noise(), accumulate=0)


@answered(WARNING, value="used up", limit="begins with the batch after it", remedy="docs/guides/data.md")
def a_look_at_the_first_batch(scene: Scene) -> None:
    loader = ResumableDataLoader(Noise(), batch_size=8)
    next(iter(loader))
    for _ in loader:
        pass


@answered(KeyError, value="'data'", limit="rank 1", remedy="common state")
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


@answered(ConfigError, value="'param_groups'", limit="a ResumableDataLoader", remedy="give what state_dict()")
def state_of_something_else(scene: Scene) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    ResumableDataLoader(Noise(), batch_size=8).load_state_dict(optimizer.state_dict())
