"""Ways in which libraries put averaged weights in the place of a model's for an evaluation, and back.

Each is a generator: it stops where the evaluation would be. Of diffusers and torch_ema there are the lines that write.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

Way = Callable[[nn.Module], Iterator[None]]


def averages(model: nn.Module) -> list[torch.Tensor]:
    return [torch.full_like(each, 0.25, requires_grad=False) for each in model.parameters()]


def diffusers(model: nn.Module) -> Iterator[None]:
    """EMAModel's store, copy_to and restore."""
    stored = [each.detach().cpu().clone() for each in model.parameters()]
    for average, each in zip(averages(model), model.parameters(), strict=True):
        each.data.copy_(average.to(each.device).data)
    yield
    for kept, each in zip(stored, model.parameters(), strict=True):
        each.data.copy_(kept.data)


def state_dicts(model: nn.Module) -> Iterator[None]:
    """torch's AveragedModel, by state dicts: torch counts these writes, and none of those above."""
    average, kept = AveragedModel(model), {name: each.clone() for name, each in model.state_dict().items()}
    for each in average.parameters():
        each.data.fill_(0.25)
    model.load_state_dict(average.module.state_dict())
    yield
    model.load_state_dict(kept)


SWAPS: list[Way] = [diffusers, state_dicts]


def pointers(model: nn.Module) -> Iterator[None]:
    kept = [each.data for each in model.parameters()]
    for each, average in zip(model.parameters(), averages(model), strict=True):
        each.data = average
    yield
    for each, old in zip(model.parameters(), kept, strict=True):
        each.data = old
