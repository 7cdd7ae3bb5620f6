"""Saves that overlap with training hold what the state was when they were made, whatever training does meanwhile."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt._core.format.plan import Plan, Planner
from fastckpt._core.snapshot import mutation_check
from fastckpt.errors import OverlapError
from tests.e2e.ddp.conftest import Ranks
from tests.e2e.ddp.overlapping import Held, Training, assert_right, batch, in_memory, net, newest
from tests.e2e.ddp.overlapping import held as held
from tests.unit._core.format.baking import assert_same, reference

Optimizer = torch.optim.Optimizer
pytestmark = pytest.mark.usefixtures("held")


def adam(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def whole(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}


def learn(model: nn.Module, *optimizers: Optimizer) -> None:
    for each in optimizers:
        each.zero_grad()
    model(batch()).square().sum().backward()
    for each in optimizers:
        each.step()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused Adam": lambda p: torch.optim.Adam(p, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overlapped_save_with_each_kind_of_optimizer_holds_its_step(ranks: Ranks, held: Held, name: str):
    training = Training(ranks, OPTIMIZERS[name])
    assert_right(training.one, training.learn, training.state)
    phases = ["overlap.wait", "overlap.copy", "overlap.compare", "overlap.commit", "overlap.notify"]
    assert held.said == [(phase, step) for step in (2, 3, 4) for phase in phases]


@dataclass
class Loop:
    """One iteration, and the state that is saved then."""

    optimizers: list[Optimizer]
    iterate: Callable[[], object]
    state: Callable[[], dict[str, Any]]


def plain(model: nn.Module) -> Loop:
    optimizer = adam(model)
    return Loop([optimizer], partial(learn, model, optimizer), partial(whole, model, optimizer))


def step_with_closure() -> Loop:
    model, inputs = net(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().sum()
        loss.backward()
        return loss

    return Loop([optimizer], lambda: optimizer.step(closure), partial(whole, model, optimizer))


def compiled_step() -> Loop:
    loop = plain(model := net())
    update = torch.compile(loop.optimizers[0].step, backend="eager")

    def iterate() -> None:
        loop.optimizers[0].zero_grad()
        model(batch()).square().sum().backward()
        update()

    loop.iterate = iterate
    return loop


class Flat(nn.Module):
    """Parameters and a buffer are parts of one storage, as some libraries lay them out."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(30)
        self.a = nn.Parameter(flat[:10])
        self.b = nn.Parameter(flat[10:20])
        self.register_buffer("mean", flat[20:])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.add_(1)
        return inputs.sum() * self.a.exp() + self.b


def weights_that_are_there_in_parts() -> Loop:
    loop = plain(model := net())
    weight = model[0].weight
    parts = {"row": weight[0], "again": weight.detach(), "list": [weight.data] * 2}
    loop.state = lambda: whole(model, *loop.optimizers) | parts
    return loop


@pytest.mark.parametrize("make", [step_with_closure, compiled_step, weights_that_are_there_in_parts])
def test_an_overlapped_save_in_each_kind_of_loop_holds_its_step(ranks: Ranks, said, make: Callable[[], Loop]):
    loop = make()
    (one,) = ranks.start(overlap=loop.optimizers)
    assert_right(one, loop.iterate, loop.state)
    assert "was written to" not in said.text


def test_an_optimizer_not_given_to_overlap_has_its_state_deferred_and_no_parameters(ranks: Ranks, held: Held):
    given, other = net(), net()
    optimizers = [adam(given), adam(other)]

    def iterate() -> None:
        learn(given, optimizers[0])
        learn(other, optimizers[1])

    (one,) = ranks.start(overlap=optimizers[0])
    assert_right(one, iterate, lambda: {"a": given.state_dict(), "b": whole(other, *optimizers)})
    optimizers[1].step()
    assert newest(one)[0] == 4 and held.said[-1] == ("overlap.notify", 4)


def test_a_storage_is_deferred_only_if_no_part_of_it_changes():
    model, flat = net(), Flat()
    optimizer = torch.optim.SGD([*model.parameters(), *flat.parameters()], momentum=0.9)
    learn(model, optimizer)
    frozen = {"given": torch.ones(4)}
    state = {"net": model.state_dict(), "flat": flat.state_dict(), "o": optimizer.state_dict(), **frozen}
    state["row"] = model[3].weight[0]
    plan = Planner().plan(state)
    found = mutation_check.MutationCheck([plan], [optimizer])
    deferred = {path for index, path in zip(plan.indices, plan.paths, strict=True) if is_in(found, plan, index)}
    weights = [f"state['net']['{name}']" for name, _ in model.named_parameters() if name != "3.weight"]
    momenta = [f"state['o']['state'][{i}]['momentum_buffer']" for i in range(len(list(model.parameters())))]
    assert deferred == {*weights, *momenta}


def is_in(found: mutation_check.MutationCheck, plan: Plan, index: int) -> bool:
    return bool(found.part([(0, plan.storages[index], 1)])[1])


WRITES: dict[str, Callable[[nn.Sequential], object]] = {
    "clipped": lambda model: torch.no_grad()(lambda: model[0].weight.clamp_(-0.01, 0.01))(),
    "by numpy": lambda model: model[0].weight.detach().numpy().fill(7),
}
"""Of the last torch counts nothing."""


class TestChanges:
    """Weights that something else than an optimizer's step changes."""

    @pytest.mark.parametrize("write", WRITES)
    def test_a_write_during_the_copy_loses_the_save_and_ends_overlap(self, ranks: Ranks, said, write: str):
        training = Training(ranks).proven()
        assert training.save(1).pending
        WRITES[write](training.model)
        assert not said.records
        training.optimizer.step()
        (warning,) = [record.message for record in said.records if "overlap with" in record.message]
        assert "state['model']['0.weight'] was written to between the save of step 1 and the next step" in warning
        assert "was not saved" in warning and newest(training.one)[0] == 0
        wanted = reference(training.state())
        result = training.save(2)
        assert (result.saved, result.pending, result.skipped) == (True, False, 1)
        assert "step 1 of history 1 was not saved: state['model']['0.weight'] was written to" in result.trouble
        assert_same(in_memory(training.one), (2, wanted))
        assert training.save(3).trouble == ""

    def test_writes_in_each_forward_are_detected_before_any_save_is_lost(self, ranks: Ranks, said):
        training = Training(ranks, model=nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 1)))
        for step in range(1, 5):
            training.optimizer.zero_grad()
            training.model(torch.arange(9)).sum().backward()
            training.optimizer.step()
            wanted = reference(training.state())
            result = training.save(step)
            assert (result.saved, result.pending, result.skipped, result.trouble) == (True, False, 0, "")
            assert_same(in_memory(training.one), (step, wanted))
        assert said.text.count("state['model']['0.weight'] was written to") == 1

    def test_weights_moved_to_shared_memory_during_the_copy_are_saved(self, ranks: Ranks):
        """Which frees the memory where they were. Queues do that in a thread of their own."""
        training = Training(ranks, model=nn.Linear(1500, 1500)).proven()
        for step in (1, 2):  # what is shared is copied at once from then on, and torch has no cause to wait for it
            wanted = reference(training.state())
            result = training.save(step)
            assert (result.pending, result.skipped, result.trouble) == (True, 0, "")
            if step == 1:
                queue = threading.Thread(target=training.model.share_memory)
                queue.start()
                queue.join()
            else:
                training.optimizer.step()
            assert_same(in_memory(training.one), (step, wanted))
            training.optimizer.step()
        assert not torch.storage._share_memory_map


class TestChecked:
    """With FASTCKPT_CHECK_OVERLAP=1 what versions do not show is found, too."""

    @pytest.fixture
    def training(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Training:
        monkeypatch.setenv("FASTCKPT_CHECK_OVERLAP", "1")
        training = Training(ranks)
        training.learn()
        return training

    def test_the_overlap_check_raises_at_close_once_everything_is_closed(self, training: Training):
        training.save(1)
        training.model[0].weight.data.zero_()
        with pytest.raises(OverlapError):
            training.one.close()
        training.one.close()
        training.optimizer.step()
