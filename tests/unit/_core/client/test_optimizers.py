"""Compatibility of optimizers with saved states, by their classes."""

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


def of(kind: Any, **options: Any) -> Any:
    return kind([torch.nn.Parameter(torch.zeros(2))], **options)


def resumes(saved: Any, now: Any) -> bool:
    try:
        check_kinds(kinds({"optimizer": saved}), kinds({"optimizer": now}))
    except ConfigError as error:
        assert type(saved).__name__ in str(error) and type(now).__name__ in str(error), error
        return False
    return True


@pytest.mark.parametrize(
    ("saved", "now", "fits"),
    [
        (AdamW, AdamW, True),
        (AdamW, SGD, False),
        (AdamW, Adam, False),
        (Adam, AdamW, False),  # AdamW derives from Adam, and would silently decay as that does
        (AdamW, MyAdamW, True),
        (MyAdamW, AdamW, True),
        (MyAdamW, MySGD, False),
        (Lion, Lion, True),
        (Lion, SGD, False),
    ],
)
def test_an_optimizer_class_accepts_only_compatible_states(saved: Any, now: Any, fits: bool) -> None:
    assert resumes(of(saved), of(now)) is fits


def test_variants_and_wrappers_of_an_optimizer_class_are_compatible() -> None:
    assert resumes(of(AdamW, foreach=True), of(AdamW, fused=True))
    assert resumes(Wrapper(of(AdamW)), of(AdamW))
    assert resumes(of(AdamW), Wrapper(Wrapper(of(AdamW))))
    with pytest.raises(ConfigError, match="optimizer was saved as AdamW, and is SGD now"):
        check_kinds(kinds({"optimizer": of(AdamW)}), kinds({"optimizer": Wrapper(of(SGD))}))


def test_each_of_several_optimizers_is_compared_by_class() -> None:
    saved = kinds({"optimizer": [of(AdamW), of(SGD)], "critic": of(Adam), "model": torch.nn.Linear(1, 1)})
    assert saved == {"optimizer": [["AdamW"], ["SGD"]], "critic": [["Adam"]]}
    with pytest.raises(ConfigError, match="optimizer 1 was saved as SGD, and is AdamW now"):
        check_kinds(saved, kinds({"optimizer": [of(AdamW), of(AdamW)]}))
    with pytest.raises(ConfigError, match="critic was saved as Adam, and is SGD now"):
        check_kinds(saved, kinds({"critic": of(SGD)}))
    check_kinds(saved, kinds({"optimizer": [of(AdamW), of(SGD)], "critic": of(Adam), "actor": of(SGD)}))


def test_a_checkpoint_of_an_earlier_version_without_classes_is_accepted() -> None:
    check_kinds(None, kinds({"optimizer": of(SGD)}))
