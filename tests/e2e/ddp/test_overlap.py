"""Saves that overlap with training hold what the state was when they were made, whatever training does meanwhile."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fastckpt import Checkpointer
from fastckpt._core.format.plan import Planner
from fastckpt._core.snapshot import mutation_check
from fastckpt._core.snapshot.sampled_bytes import SampledBytes
from fastckpt.errors import OverlapError
from tests.e2e.ddp.overlapping import (
    DEADLINE,
    Held,
    Training,
    assert_lost,
    assert_right,
    batch,
    in_memory,
    net,
    newest,
)
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


# --- weights that are swapped for others while they are copied, and swapped back before that ends
# Ways to swap are generators that stop where an evaluation would be. Of diffusers there are the lines that write.


def averages(model: nn.Module) -> list[torch.Tensor]:
    return [torch.full_like(each, 0.25, requires_grad=False) for each in model.parameters()]


def diffusers(model: nn.Module) -> Iterator[None]:
    """EMAModel's store, copy_to and restore."""
    stored = [each.detach().cpu().clone() for each in model.parameters()]
    for average, each in zip(averages(model), model.parameters(), strict=True):
        each.data.copy_(average.to(each.device).data)
    yield
    for kept, each in zip(stored, model.parameters(), strict=True):
        each.data.copy_(kept.data)


def state_dicts(model: nn.Module) -> Iterator[None]:
    """torch's AveragedModel, by state dicts: torch counts these writes, and none of those above."""
    average, kept = AveragedModel(model), {name: each.clone() for name, each in model.state_dict().items()}
    for each in average.parameters():
        each.data.fill_(0.25)
    model.load_state_dict(average.module.state_dict())
    yield
    model.load_state_dict(kept)


def pointers(model: nn.Module) -> Iterator[None]:
    kept = [each.data for each in model.parameters()]
    for each, average in zip(model.parameters(), averages(model), strict=True):
        each.data = average
    yield
    for each, old in zip(model.parameters(), kept, strict=True):
        each.data = old


def save_while(training: Training, held: Held, swap: Iterator[None], step: int = 1) -> Any:
    """Save; all is copied while the weights are swapped. What torch.save would have written at the save."""
    swapped, copied = threading.Event(), threading.Event()
    held.holds = False
    held.on = {"overlap.copy": lambda: swapped.wait(DEADLINE), "overlap.compare": copied.set}
    wanted = reference(training.state())
    assert training.save(step).pending
    next(swap)
    swapped.set()
    assert copied.wait(DEADLINE)
    assert next(swap, "over") == "over"
    held.on = {}
    return wanted


@pytest.mark.parametrize("swap", [diffusers, state_dicts])
def test_a_swap_that_is_undone_loses_the_save_and_ends_overlap(ranks, held, said, swap):
    training = Training(ranks).proven()
    save_while(training, held, swap(training.model))
    training.optimizer.step()
    how = r"^state\['model'\]\['\d\.(weight|bias)'\] was written to"  # threads compare all
    assert_lost(training, said, how, "was written to while it was copied")


@pytest.mark.campaign
def test_of_1000_swaps_at_any_instant_no_save_with_swapped_weights_counts(ranks, held):
    held.holds = False
    training = Training(ranks, model=nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))).proven()
    wanted, overlap, lost = reference(training.state()), training.one._writer.overlap, 0
    kept = [each.detach().clone() for each in training.model.parameters()]
    for step in range(1, 1001):
        overlap.defer([training.optimizer])  # as if the last swap had not ended overlap
        assert training.save(step).pending
        for weights in (averages(training.model), kept):
            time.sleep(random.random() ** 2 * 0.02)
            for each, source in zip(training.model.parameters(), weights, strict=True):
                each.data.copy_(source)
        overlap.wait()
        _, outcome = overlap._endings.pop()
        lost += bool(outcome.skipped)
        if not outcome.skipped:
            assert_same(in_memory(training.one), (step, wanted))
    assert lost > 100


def test_writes_to_other_memory_during_the_copy_lose_no_save(ranks, held, said):
    training = Training(ranks).proven()
    for step in (1, 2):
        wanted = save_while(training, held, pointers(training.model), step)
        training.optimizer.step()
        assert_same(in_memory(training.one), (step, wanted))
    assert "was written to" not in said.text


def test_a_swap_of_a_single_value_is_detected_when_everything_is_digested(ranks, held, monkeypatch):
    monkeypatch.setenv("FASTCKPT_CHECK_OVERLAP", "1")
    training = Training(ranks)

    def swap(weight: torch.Tensor, place: int) -> Iterator[None]:
        flat = weight.data.view(-1)
        before = flat[place].clone()
        flat[place] += 1
        yield
        flat[place] = before

    for step in range(1, 5):
        name, weight = random.choice(list(training.model.named_parameters()))
        save_while(training, held, swap(weight, random.randrange(weight.numel())), step)
        with pytest.raises(OverlapError, match=f"'{name}'.* changed between the save of step {step}"):
            training.one.wait_latest_checkpoint()
    assert newest(training.one) is None


@pytest.mark.parametrize(
    "part", [lambda flat: flat[5:6], lambda flat: flat[:900_000].view(900, 1000)[:, 7]], ids=["short", "column"]
)
def test_each_tensor_that_is_a_view_of_a_storage_has_a_sample(part):
    flat, target = torch.zeros(1_000_000), torch.empty(1_000_000)
    tensor, storage = part(flat), flat.untyped_storage()
    for _ in range(5):
        flat.zero_()
        taken = SampledBytes([(target.data_ptr(), storage, target.nbytes)], lambda _: [tensor, flat[:0]])
        target.copy_(flat)
        assert taken.differing_source() is None and taken.differing_copy() is None
        tensor.fill_(1)
        target.copy_(flat)
        assert taken.differing_source() is not None and taken.differing_copy() is not None


@pytest.mark.parametrize("overlap", [True, False])
def test_saves_of_the_loop_overlap_unless_its_option_is_false(tmp_path, held, overlap):
    held.holds = False
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    results: list[Any] = []
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=1, overlap=overlap) as checkpointer:
        checkpointer.resume()
        for step in range(1, 4):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            results.append(checkpointer.step(step))
            for _ in () if overlap else diffusers(model):
                pass
    assert [(result.saved, result.pending) for result in results] == [(True, False), (True, overlap), (True, overlap)]
    again = nn.Linear(300, 300)
    with Checkpointer(tmp_path, model=again, optimizer=torch.optim.AdamW(again.parameters())) as checkpointer:
        assert checkpointer.resume() == 3
    assert_same(again.state_dict(), model.state_dict())
