"""Saves that overlap with training hold what the state was when they were made, whatever training does meanwhile."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch

from fastckpt.ddp import DdpCheckpointer
from fastckpt.engine import still
from fastckpt.errors import ConfigError
from tests.ddp.conftest import Ranks
from tests.ddp.overlapping import Held, assert_right, batch, in_memory, net, newest
from tests.format.baking import assert_same, reference

Optimizer = torch.optim.Optimizer


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(still, "WORTH", 1)
    with Held() as held:
        yield held


def adam(model: torch.nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def start(ranks: Ranks, *optimizers: Optimizer) -> DdpCheckpointer:
    return ranks.start(overlap=optimizers)[0]


def whole(model: torch.nn.Module, *optimizers: Optimizer, **more: Any) -> Callable[[], dict[str, Any]]:
    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]} | more

    return state


def learn(model: torch.nn.Module, *optimizers: Optimizer) -> None:
    for each in optimizers:
        each.zero_grad()
    model(batch()).square().sum().backward()
    for each in optimizers:
        each.step()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "fused Adam": lambda p: torch.optim.Adam(p, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


class TestOptimizers:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_each_kind(self, ranks: Ranks, held: Held, name: str):
        model = net()
        optimizer = OPTIMIZERS[name](model.parameters())
        one = start(ranks, optimizer)
        assert_right(one, lambda: learn(model, optimizer), whole(model, optimizer))
        phases = ["overlap.wait", "overlap.copy", "overlap.compare", "overlap.commit", "overlap.notify"]
        assert held.said == [(phase, step) for step in (2, 3, 4) for phase in phases]

    def test_one_with_a_closure(self, ranks: Ranks):
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        inputs = batch()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).square().sum()
            loss.backward()
            return loss

        one = start(ranks, optimizer)
        assert_right(one, lambda: optimizer.step(closure), whole(model, optimizer))

    def test_several_that_take_turns(self, ranks: Ranks):
        first, second = net(), net()
        optimizers = [adam(first), torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.5)]
        turns = count()

        def iterate() -> None:
            which = next(turns) % 2
            learn((first, second)[which], optimizers[which])

        one = start(ranks, *optimizers)
        assert_right(one, iterate, lambda: {"a": first.state_dict(), "b": whole(second, *optimizers)()}, steps=5)

    def test_one_that_was_not_given_waits_too_and_its_parameters_do_not(self, ranks: Ranks, held: Held):
        given, other = net(), net()
        optimizers = [adam(given), adam(other)]

        def iterate() -> None:
            learn(given, optimizers[0])
            learn(other, optimizers[1])

        one = start(ranks, optimizers[0])
        assert_right(one, iterate, lambda: {"a": given.state_dict(), "b": whole(other, *optimizers)()})
        optimizers[1].step()
        assert newest(one)[0] == 4 and held.said[-1] == ("overlap.notify", 4)

    def test_a_compiled_step(self, ranks: Ranks):
        model = net()
        optimizer = adam(model)

        @torch.compile(backend="eager")
        def update() -> None:
            optimizer.step()

        def iterate() -> None:
            optimizer.zero_grad()
            model(batch()).square().sum().backward()
            update()

        one = start(ranks, optimizer)
        assert_right(one, iterate, whole(model, optimizer), steps=3)

    def test_a_step_that_the_scaler_skips_waits_for_nothing(self, ranks: Ranks, held: Held):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

        def iterate(*, overflow: bool = False) -> None:
            optimizer.zero_grad()
            scaler.scale(model(batch()).square().sum() * (float("inf") if overflow else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

        def state() -> dict[str, Any]:
            return whole(model, optimizer)() | {"scaler": scaler.state_dict()}

        def skipped() -> None:
            before = len(held.said)
            iterate(overflow=True)
            assert len(held.said) == before

        one = start(ranks, optimizer)
        assert_right(one, iterate, state, after_save=skipped)

    def test_what_is_none_is_refused(self, ranks: Ranks):
        with pytest.raises(ConfigError, match="overlap has a Linear"):
            ranks.start(overlap=[torch.nn.Linear(1, 1)])


class TestModels:
    def test_buffers_of_batch_norm(self, ranks: Ranks):
        """The next forward writes to them before the copy begins."""
        model = net()
        optimizer = adam(model)
        assert_right(
            start(ranks, optimizer),
            lambda: learn(model, optimizer),
            whole(model, optimizer),
            after_save=lambda: model(batch()),
        )

    def test_an_average_of_weights(self, ranks: Ranks):
        model = net()
        optimizer = adam(model)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        assert_right(
            start(ranks, optimizer),
            lambda: learn(model, optimizer),
            lambda: whole(model, optimizer)() | {"average": average.state_dict()},
            after_save=lambda: average.update_parameters(model),
        )

    @pytest.mark.parametrize("to_none", [True, False])
    def test_gradients_in_the_middle_of_accumulation(self, ranks: Ranks, to_none: bool):
        """Saved on request, after each micro-batch; the next adds to them, or they are zeroed, before the copy."""
        model = net()
        optimizer = adam(model)

        def state() -> dict[str, Any]:
            gradients = {name: p.grad for name, p in model.named_parameters()}
            return whole(model, optimizer)() | {"gradients": gradients}

        one = start(ranks, optimizer)
        model(batch()).square().sum().backward()
        for step in range(1, 5):
            wanted = reference(current := state())
            assert one.save_checkpoint(step, current)
            model(batch()).square().sum().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
                model(batch()).square().sum().backward()
            one.prepare(state())
            assert in_memory(one)[0] == step
            assert_same(in_memory(one)[1], wanted)
