"""Compatibility of optimizers with saved states, by their classes."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from fastckpt._core.client.optimizers import check_kinds, kinds
from fastckpt.errors import ConfigError
from tests.support.tables import for_each


class Logged:
    """A mixin of a user's."""


class MyAdamW(Logged, AdamW):
    pass


class MySGD(Logged, SGD):
    pass


class Lion(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})


class Wrapper:
    """As accelerate's has it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def of(kind: Any) -> Any:
    return kind([torch.nn.Parameter(torch.zeros(2))])


def optimizers(**kinds: Any) -> dict[str, Any]:
    return {name: [*map(of, kind)] if isinstance(kind, list) else of(kind) for name, kind in kinds.items()}


SEVERAL = {"optimizer": [AdamW, SGD], "critic": Adam}


@for_each(
    ({"it": AdamW}, {"it": SGD}, "it was saved as AdamW, and is SGD now"),
    ({"it": Adam}, {"it": AdamW}, "saved as Adam, and is AdamW now"),  # which would silently decay as that does
    ({"it": AdamW}, {"it": MyAdamW}, ""),
    ({"it": MyAdamW}, {"it": AdamW}, ""),
    ({"it": MyAdamW}, {"it": MySGD}, "saved as MyAdamW, and is MySGD now"),
    ({"it": Lion}, {"it": SGD}, "saved as Lion, and is SGD now"),
    ({"it": partial(AdamW, foreach=True)}, {"it": partial(AdamW, fused=True)}, ""),
    ({"it": AdamW}, {"it": lambda parameters: Wrapper(Wrapper(AdamW(parameters)))}, ""),
    (SEVERAL, {"optimizer": [AdamW, AdamW]}, "optimizer 1 was saved as SGD, and is AdamW now"),
    (SEVERAL, {"critic": SGD}, "critic was saved as Adam, and is SGD now"),
    (SEVERAL, SEVERAL | {"actor": SGD}, ""),
)
def test_an_optimizer_class_accepts_only_compatible_states(saved: Any, now: Any, says: str) -> None:
    model = {"model": torch.nn.Linear(1, 1)}
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        check_kinds(kinds(optimizers(**saved) | model), kinds(optimizers(**now)))
    check_kinds(None, kinds(optimizers(**now)))  # of an earlier version, without classes
