"""The size of a training's state is known from its optimizers, before its first save."""

import torch

from fastckpt._core.snapshot.optimizer_forecast import SizeForecast
from tests.support.tables import for_each


class Session:
    def __init__(self) -> None:
        self.reports: list[dict[str, int]] = []

    def expect(self, sizes: dict[str, int]) -> None:
        self.reports.append(sizes)


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


@for_each((Odd, torch.ones(10), 4040), (Odd, [1], 4000), (Odd, None, 4000), (Equal, {}, None))
def test_an_optimizer_of_any_make_takes_its_steps(kind, held, size):
    session = Session()
    forecast = SizeForecast("model.pt", session.expect)
    odd = kind([torch.nn.Parameter(torch.ones(1000))], held)
    for _ in range(3):
        odd.step()
    assert session.reports == ([{"model.pt": size}] if size else [])
    forecast.end()
