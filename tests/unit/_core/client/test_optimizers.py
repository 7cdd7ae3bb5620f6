"""Compatibility of optimizers with saved states, by their classes."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from fastckpt._core.client.optimizers import check_kinds, kinds
from fastckpt.errors import ConfigError


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


@pytest.mark.parametrize(
    ("saved", "now", "fits"),
    [
        (AdamW, SGD, False),
        (Adam, AdamW, False),  # AdamW derives from Adam, and would silently decay as that does
        (AdamW, MyAdamW, True),
        (MyAdamW, AdamW, True),
        (MyAdamW, MySGD, False),
        (Lion, SGD, False),
        (partial(AdamW, foreach=True), partial(AdamW, fused=True), True),
        (AdamW, lambda parameters: Wrapper(Wrapper(AdamW(parameters))), True),
    ],
)
def test_an_optimizer_class_accepts_only_compatible_states(saved: Any, now: Any, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(ConfigError) as error:
        check_kinds(kinds({"optimizer": of(saved)}), kinds({"optimizer": of(now)}))
    if not fits:
        assert f"optimizer was saved as {saved.__name__}, and is {now.__name__} now" in str(error.value)


def test_each_of_several_optimizers_is_compared_by_class() -> None:
    saved = kinds({"optimizer": [of(AdamW), of(SGD)], "critic": of(Adam), "model": torch.nn.Linear(1, 1)})
    assert saved == {"optimizer": [["AdamW"], ["SGD"]], "critic": [["Adam"]]}
    with pytest.raises(ConfigError, match="optimizer 1 was saved as SGD, and is AdamW now"):
        check_kinds(saved, kinds({"optimizer": [of(AdamW), of(AdamW)]}))
    with pytest.raises(ConfigError, match="critic was saved as Adam, and is SGD now"):
        check_kinds(saved, kinds({"critic": of(SGD)}))
    check_kinds(saved, kinds({"optimizer": [of(AdamW), of(SGD)], "critic": of(Adam), "actor": of(SGD)}))
    check_kinds(None, kinds({"optimizer": of(SGD)}))  # of an earlier version, without classes
