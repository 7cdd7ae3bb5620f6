"""Mistakes with the data: the loader's arguments, and where its position is kept."""

import torch

from fastckpt.data import ResumableDataLoader
from fastckpt.errors import ConfigError
from tests.e2e.mistakes.table import WARNING, Noise, Scene, answered


@answered(TypeError, "'batchsize' | num_workers | did you mean 'batch_size'?")
def loader_typo(scene: Scene) -> None:
    ResumableDataLoader(Noise(), batchsize=8)


@answered(WARNING, "used up | begins with the batch after it | docs/guides/data.md")
def a_look_at_the_first_batch(scene: Scene) -> None:
    loader = ResumableDataLoader(Noise(), batch_size=8)
    next(iter(loader))
    for _ in loader:
        pass


@answered(ConfigError, "'param_groups' | a ResumableDataLoader | give what state_dict()")
def state_of_something_else(scene: Scene) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    ResumableDataLoader(Noise(), batch_size=8).load_state_dict(optimizer.state_dict())
