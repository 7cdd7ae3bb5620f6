"""Values in the wrong places of public calls: each is answered before anything is saved."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastckpt.ddp import DdpCheckpointer, KeepEpochStrategy
from fastckpt.engine.service import stop_own_saver
from fastckpt.errors import ConfigError

MODEL = torch.nn.Linear(2, 2)
STATE = {"model": MODEL.state_dict()}

DDP: dict[str, tuple[Callable[[DdpCheckpointer], Any], str]] = {
    "no state": (lambda c: c.save_checkpoint(1, None), "state_dict is None; give a dict"),
    "a step of numpy": (lambda c: c.save_checkpoint(np.float32(3), STATE), "give int"),
    "a null byte in a path": (lambda c: c.save_checkpoint(1, STATE, "a\0b"), "path is 'a.x00b'; no file can have null"),
    "a path that is not UTF-8": (lambda c: c.save_checkpoint(1, STATE, "a\udc80"), "rename it"),
    "a null byte in what to resume": (lambda c: c.load_checkpoint("a\0b"), "resume_path is 'a.x00b'"),
    "a null byte in a directory": (lambda _: DdpCheckpointer("a\0b"), "checkpoint_dir is 'a.x00b'"),
    "a directory that is not UTF-8": (lambda _: DdpCheckpointer("a\udc80"), "checkpoint_dir is .* rename it"),
    "no timeout": (lambda c: c.wait_latest_checkpoint(None), "timeout is None; give seconds"),
    "a timeout as text": (lambda c: c.wait_latest_checkpoint("5"), "timeout is '5'; give seconds"),
    "a timeout that never ends": (lambda c: c.wait_latest_checkpoint(float("nan")), "timeout is nan; give seconds"),
    "prepare for no state": (lambda c: c.prepare(None), "state_dict is None; give a dict"),
    "prepare for a number": (lambda c: c.prepare(STATE, 3), "optimizer is 3; it is to be a torch optimizer"),
    "a strategy without a directory": (lambda _: KeepEpochStrategy(), "give checkpoint_dir="),
}


@pytest.fixture(autouse=True)
def _no_saver() -> Iterator[None]:
    yield
    stop_own_saver()


@pytest.mark.parametrize("mistake", DDP)
def test_a_wrong_value_is_answered(mistake: str, tmp_path: Path) -> None:
    call, text = DDP[mistake]
    with DdpCheckpointer(tmp_path / "checkpoints") as checkpointer, pytest.raises(ConfigError, match=text):
        call(checkpointer)
