"""Saves that overlap with training hold what the state was when they were made, whatever training does meanwhile."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt._core.format.plan import Planner
from fastckpt._core.snapshot import mutation_check
from fastckpt.errors import OverlapError
from tests.e2e.ddp.overlapping import Training, assert_lost, assert_right, batch, in_memory, net, newest
from tests.e2e.ddp.overlapping import held as held
from tests.unit._core.format.baking import assert_same, reference

Optimizer = torch.optim.Optimizer
pytestmark = pytest.mark.usefixtures("held")


def whole(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}


def learn(model: nn.Module, *optimizers: Optimizer) -> None:
    for each in optimizers:
        each.zero_grad()
    model(batch()).square().sum().backward()
    for each in optimizers:
        each.step()


class Loop:
    """Iterations with one optimizer, and the state that is saved after each."""

    def __init__(self, make: Callable[[Any], Optimizer] = torch.optim.AdamW) -> None:
        self.model = net()
        self.optimizer = make(self.model.parameters())
        self.update = self.optimizer.step
        self.more = dict[str, Any]()

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        self.model(batch()).square().sum().backward()
        self.update()

    def state(self) -> dict[str, Any]:
        return whole(self.model, self.optimizer) | self.more


def step_with_closure() -> Loop:
    loop, inputs = Loop(lambda p: torch.optim.LBFGS(p, max_iter=3)), batch()

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss: torch.Tensor = loop.model(inputs).square().sum()
        loss.backward()
        return loss

    loop.iterate = lambda: loop.optimizer.step(closure)  # type: ignore[method-assign]
    return loop


def compiled_step() -> Loop:
    loop = Loop()
    loop.update = torch.compile(loop.optimizer.step, backend="eager")
    return loop


def weights_that_are_there_in_parts() -> Loop:
    loop = Loop()
    weight = loop.model[0].weight
    loop.more = {"row": weight[0], "again": weight.detach(), "list": [weight.data] * 2}
    return loop


def fused_step() -> Loop:
    return Loop(lambda p: torch.optim.Adam(p, fused=True))


def learning_rate_in_a_tensor() -> Loop:
    return Loop(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False))


@pytest.mark.parametrize(
    "make",
    [
        fused_step,
        learning_rate_in_a_tensor,
        step_with_closure,
        weights_that_are_there_in_parts,
        pytest.param(compiled_step, marks=pytest.mark.campaign),
    ],
)
def test_an_overlapped_save_in_each_kind_of_loop_holds_its_step(ranks, held, said, make):
    loop = make()
    (one,) = ranks.start(overlap=loop.optimizer)
    assert_right(one, loop.iterate, loop.state)
    phases = ["overlap.wait", "overlap.copy", "overlap.compare", "overlap.commit", "overlap.notify"]
    assert held.said == [(phase, step) for step in (2, 3, 4) for phase in phases]
    assert "was written to" not in said.text


def test_an_optimizer_not_given_to_overlap_has_its_state_deferred_and_no_parameters(ranks, held):
    given, other = net(), net()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (given, other)]

    def iterate() -> None:
        learn(given, optimizers[0])
        learn(other, optimizers[1])

    (one,) = ranks.start(overlap=optimizers[0])
    assert_right(one, iterate, lambda: {"a": given.state_dict(), "b": whole(other, *optimizers)})
    optimizers[1].step()
    assert newest(one)[0] == 4 and held.said[-1] == ("overlap.notify", 4)


class Flat(nn.Module):
    """Parameters and a buffer are parts of one storage, as some libraries lay them out."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(30)
        self.a, self.b = nn.Parameter(flat[:10]), nn.Parameter(flat[10:20])
        self.register_buffer("mean", flat[20:])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.add_(1)
        return inputs.sum() * self.a.exp() + self.b


def test_a_storage_is_deferred_only_if_no_part_of_it_changes():
    """Nor another process, nor without a version, as tensors of inference mode are."""
    model, flat, shared = net(), Flat(), nn.Linear(5, 1).share_memory()
    optimizer = torch.optim.SGD([*model.parameters(), *flat.parameters(), *shared.parameters()], momentum=0.9)
    learn(model, optimizer)
    with torch.inference_mode():
        optimizer.state[model[0].weight]["no_version"] = torch.ones(9)
    state = {"net": model.state_dict(), "flat": flat.state_dict(), "o": optimizer.state_dict(), "given": torch.ones(4)}
    state["shared"] = shared.state_dict()
    plan = Planner().plan(state | {"row": model[3].weight[0]})
    found = mutation_check.MutationCheck([plan], [optimizer])
    deferred = {
        path
        for index, path in zip(plan.indices, plan.paths, strict=True)
        if found.part([(0, plan.storages[index], 1)])[1]
    }
    weights = [f"state['net']['{name}']" for name, _ in model.named_parameters() if name != "3.weight"]
    momenta = [f"state['o']['state'][{i}]['momentum_buffer']" for i in range(len(list(model.parameters())))]
    assert deferred == {*weights, *momenta}


# --- weights that something else than an optimizer's step changes


WRITES: dict[str, Callable[[nn.Sequential], object]] = {
    "clipped": lambda model: torch.no_grad()(lambda: model[0].weight.clamp_(-0.01, 0.01))(),
    "by numpy": lambda model: model[0].weight.detach().numpy().fill(7),
}
"""Of the last torch counts nothing."""


@pytest.mark.parametrize("write", WRITES)
def test_a_write_during_the_copy_loses_the_save_and_ends_overlap(ranks, said, write):
    training = Training(ranks).proven()
    assert training.save(1).pending
    WRITES[write](training.model)
    assert not said.records
    training.optimizer.step()
    name = r"state\['model'\]\['0.weight'\] was written to"
    how = rf"{name} between the save of step 1 and the next step.*was not saved"
    assert_lost(training, said, how, "step 1 of history 1 was not saved: state['model']['0.weight'] was written to")
    assert training.save(3).trouble == ""


def test_writes_in_each_forward_are_detected_before_any_save_is_lost(ranks, said):
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


def test_weights_moved_to_shared_memory_during_the_copy_are_saved(ranks):
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


def test_the_overlap_check_raises_at_close_once_everything_is_closed(ranks, monkeypatch):
    """With FASTCKPT_CHECK_OVERLAP=1 what versions do not show is found, too."""
    monkeypatch.setenv("FASTCKPT_CHECK_OVERLAP", "1")
    training = Training(ranks)
    training.learn()
    training.save(1)
    training.model[0].weight.data.zero_()
    with pytest.raises(OverlapError):
        training.one.close()
    training.one.close()
    training.optimizer.step()
