"""Optimizers whose wrapper never called ``super().__init__()``, as trainers of others make them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpShardCheckpointer


class Wrapper(torch.optim.Optimizer):
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        for number, each in enumerate(optimizers):
            setattr(self, f"optimizer{number}", each)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer0.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer0.state_dict()


def trained(seed: int) -> tuple[nn.Module, Wrapper]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optimizer = Wrapper(torch.optim.AdamW(model.parameters()))
    for _ in range(seed):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        model.zero_grad()
    return model, optimizer


def test_an_optimizer_in_an_uninitialized_wrapper_is_saved_and_loaded(tmp_path: Path):
    model, optimizer = trained(3)
    other, another = trained(1)
    with FsdpShardCheckpointer(tmp_path, overlap=optimizer) as checkpointer:
        assert checkpointer.save_checkpoint(1, model, optimizer, {"epoch": 1})
        assert checkpointer.load_checkpoint(other, another) == {"epoch": 1}
    saved, loaded = (each.state_dict()["state"] for each in (optimizer, another))
    assert all(torch.equal(loaded[n][name], saved[n][name]) for n in saved for name in saved[n]) and saved


def test_a_wrapper_around_no_or_several_optimizers_is_refused(tmp_path: Path):
    model, optimizer = trained(1)
    several = Wrapper(optimizer.optimizer0, torch.optim.SGD(model.parameters()))
    with FsdpShardCheckpointer(tmp_path / "a") as checkpointer:
        for bad, count in ((Wrapper(), 0), (several, 2)):
            with pytest.raises(ConfigError, match=f"has {count} optimizers as attributes.*give the torch optimizer"):
                checkpointer.save_checkpoint(1, model, bad)
    with pytest.raises(ConfigError, match="super"):
        DdpCheckpointer(tmp_path / "b", overlap=Wrapper())
