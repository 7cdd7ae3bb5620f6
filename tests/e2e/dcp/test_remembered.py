import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fastckpt.dcp import cached_names
from fastckpt.dcp.cached_names import named_state
from tests.unit._core.format.baking import assert_same


class Net(nn.Module):
    """A buffer, a tied weight, a frozen one, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.Parameter(torch.ones(3), requires_grad=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": int(self.norm.num_batches_tracked)}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def training() -> tuple[Net, tuple[torch.optim.Optimizer, ...]]:
    torch.manual_seed(0)
    model = Net()
    matrices, vectors = [p for p in model.parameters() if p.dim() > 1], [model.second.bias, model.first.bias]
    groups = [{"params": vectors, "lr": 0.1}, {"params": matrices}]
    optimizers = torch.optim.AdamW(groups), torch.optim.SGD(model.norm.parameters(), 0.1, momentum=0.9)
    step(model, *optimizers)
    return model, optimizers


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    times: list[int] = []

    def ask(*args: object) -> object:
        times.append(1)
        return get_state_dict(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cached_names, "get_state_dict", ask)
    return times


def test_a_remembered_state_dict_equals_that_of_torch(training, monkeypatch):
    model, optimizers = training
    times = asked(monkeypatch)
    for _ in range(3):
        step(model, *optimizers)
        optimizers[0].param_groups[0]["lr"] *= 0.5
        found = named_state(model, optimizers)
        assert_same(found, get_state_dict(model, optimizers))
    assert len(times) == 1
    assert found[0]["first.weight"].data_ptr() == model.first.weight.data_ptr()  # no copy
    assert_same(named_state(model, optimizers[:1]), get_state_dict(model, optimizers[:1]))


def another_parameter(model: Net, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    new = nn.Parameter(torch.zeros(4))
    optimizers[0].state[new] = optimizers[0].state.pop(model.first.bias)
    model.first.bias = optimizers[0].param_groups[0]["params"][1] = new


def swapped(model: Net, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    model.first, model.second = model.second, model.first


def other_order(model: Net, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    optimizers[0].param_groups[0]["params"].reverse()


def fresh_optimizer(model: Net, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    optimizers[1].state.clear()


CHANGES = [another_parameter, swapped, other_order, fresh_optimizer]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_or_optimizer_is_asked_for_its_state_dict_again(
    training, monkeypatch, change: Callable[..., None]
):
    model, optimizers = training
    named_state(model, optimizers)
    times = asked(monkeypatch)
    change(model, optimizers)
    want = get_state_dict(*copy.deepcopy((model, optimizers)))
    for _ in range(2):
        assert_same(named_state(model, optimizers), want)
        assert len(times) == 1
