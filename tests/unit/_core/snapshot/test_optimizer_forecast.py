"""The size of a training's state is known from its optimizers, before its first save."""

import pytest
import torch

from fastckpt._core.snapshot.optimizer_forecast import SizeForecast


class Session:
    def __init__(self) -> None:
        self.reports: list[dict[str, int]] = []
        self.forecast = SizeForecast("model.pt", self.expect)

    def expect(self, sizes: dict[str, int]) -> None:
        self.reports.append(sizes)


@pytest.fixture
def session():
    session = Session()
    yield session
    session.forecast.end()


def optimizer(count: int, kind=torch.optim.AdamW, **options):
    parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return kind(parameters, **options)


def test_a_second_step_reports_once_what_all_optimizers_hold(session):
    adam, sgd, frozen = optimizer(3), optimizer(2, torch.optim.SGD, lr=0.1), optimizer(1)
    frozen.param_groups[0]["params"][0].grad = None
    for _ in range(3):
        adam.step()
        if not session.reports:
            sgd.step()
            frozen.step()
    adam_bytes = 3 * (3 * 4000 + 4)  # each parameter, its two averages and its count of steps
    assert session.reports == [{"model.pt": adam_bytes + 2 * 4000 + 4000}]


class Odd(torch.optim.Optimizer):
    """Keeps something of any kind for each parameter."""

    def __init__(self, parameters, held) -> None:
        super().__init__(parameters, {})
        self.held = held

    def step(self, closure=None):
        for group in self.param_groups:
            self.state |= dict.fromkeys(group["params"], self.held)


class Equal(Odd):
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "held", "size"), [(Odd, torch.ones(10), 4040), (Odd, [1], 4000), (Odd, None, 4000), (Equal, {}, None)]
)
def test_an_optimizer_of_any_make_takes_its_steps(session, kind, held, size):
    odd = kind([torch.nn.Parameter(torch.ones(1000))], held)
    for _ in range(3):
        odd.step()
    assert session.reports == ([{"model.pt": size}] if size else [])
