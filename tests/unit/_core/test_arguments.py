"""Values in the wrong places of public calls: each is answered before anything is saved."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from fastckpt._core.in_process_saver import stop_own_saver
from fastckpt.ddp import DdpCheckpointer, KeepEpochStrategy, StorageType
from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer

MODEL = torch.nn.Linear(2, 2)
ADAM = torch.optim.Adam(MODEL.parameters())
STATE = {"model": MODEL.state_dict()}


class AroundItself(torch.optim.Optimizer):
    """A wrapper that has not called super().__init__(), and has itself as an attribute."""

    def __init__(self) -> None:
        self.optimizer = self


DDP: dict[str, tuple[Callable[[DdpCheckpointer], Any], str]] = {
    "no state": (lambda c: c.save_checkpoint(1, None), "state_dict is None; give a dict"),
    "a step of numpy": (lambda c: c.save_checkpoint(np.float32(3), STATE), "give int"),
    "a null byte in a path": (lambda c: c.save_checkpoint(1, STATE, "a\0b"), "path is 'a.x00b'; no file can have null"),
    "a path that is not UTF-8": (lambda c: c.save_checkpoint(1, STATE, "a\udc80"), "rename it"),
    "a directory that is not UTF-8": (lambda _: DdpCheckpointer("a\udc80"), "checkpoint_dir is .* rename it"),
    "no timeout": (lambda c: c.wait_latest_checkpoint(None), "timeout is None; give seconds"),
    "a timeout that never ends": (lambda c: c.wait_latest_checkpoint(float("nan")), "timeout is nan; give seconds"),
    "prepare for a number": (lambda c: c.prepare(STATE, 3), "optimizer is 3; it is to be a torch optimizer"),
    "a strategy without a directory": (lambda _: KeepEpochStrategy(), "give checkpoint_dir="),
}
FSDP: dict[str, tuple[Callable[[Any], Any], str]] = {
    "what is extra as optimizer": (lambda c: c.save_checkpoint(1, MODEL, {"epoch": 1}), "optimizer is a dict; it is"),
    "a storage type as optimizer": (lambda c: c.save_checkpoint(1, MODEL, StorageType.DISK), "optimizer is Storage"),
    "a list as extra": (lambda c: c.save_checkpoint(1, MODEL, ADAM, [1]), "extra_sd is a list; give a dict"),
    "a scheduler as optimizer": (lambda c: c.save_checkpoint(1, MODEL, StepLR(ADAM, 1)), "optimizer is a StepLR"),
    "a scheduler beside": (lambda c: c.save_checkpoint(1, MODEL, [ADAM, StepLR(ADAM, 1)]), "optimizer is a StepLR"),
    "a state as model": (lambda c: c.save_checkpoint(1, model=MODEL.state_dict()), "model is an OrderedDict; it is"),
    "an unknown argument": (lambda c: c.save_checkpoint(1, MODEL, foo=1), "no argument 'foo'; there are step"),
    "a wrapper around itself": (lambda c: c.save_checkpoint(1, MODEL, AroundItself()), "0 optimizers as attributes"),
    "load into a text": (lambda c: c.load_checkpoint(MODEL, "adam"), "optimizer is 'adam'; it is to be a torch"),
}


@pytest.fixture(autouse=True)
def _no_saver() -> Iterator[None]:
    yield
    stop_own_saver()


def refuses_each(checkpointer: Any, mistakes: dict[str, tuple[Callable[[Any], Any], str]]) -> None:
    for mistake, (call, text) in mistakes.items():
        with pytest.raises(ConfigError, match=text):
            assert call(checkpointer) is NotImplemented, f"{mistake} is accepted"


def test_a_wrong_value_is_refused_with_value_limit_and_remedy(tmp_path: Path) -> None:
    with DdpCheckpointer(tmp_path / "checkpoints") as checkpointer:
        refuses_each(checkpointer, DDP)


@pytest.mark.parametrize("kind", [FsdpShardCheckpointer, FsdpFullCheckpointer])
def test_a_value_in_place_of_another_argument_is_refused_with_a_remedy(kind: type[Any], tmp_path: Path) -> None:
    """None in place of an optimizer is none."""
    with kind(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save_checkpoint(0, MODEL, ADAM)
        refuses_each(checkpointer, FSDP)
        checkpointer.save_checkpoint(1, MODEL, None, {"epoch": 3})
        assert checkpointer.load_checkpoint(MODEL, None) == {"epoch": 3}
