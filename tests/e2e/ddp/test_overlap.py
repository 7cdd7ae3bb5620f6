"""Saves that overlap with training hold what the state was when they were made, whatever training does meanwhile."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

from fastckpt._core.format.plan import Plan, Planner
from fastckpt._core.snapshot import mutation_check
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import ConfigError, OverlapError
from tests.e2e.ddp.conftest import Ranks
from tests.e2e.ddp.overlapping import Held, assert_right, batch, in_memory, net, newest, proven
from tests.unit._core.format.baking import assert_same, reference

Optimizer = torch.optim.Optimizer


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(mutation_check, "WORTH", 1)
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
    def test_an_overlapped_save_with_each_kind_of_optimizer_holds_its_step(self, ranks: Ranks, held: Held, name: str):
        model = net()
        optimizer = OPTIMIZERS[name](model.parameters())
        one = start(ranks, optimizer)
        assert_right(one, lambda: learn(model, optimizer), whole(model, optimizer))
        phases = ["overlap.wait", "overlap.copy", "overlap.compare", "overlap.commit", "overlap.notify"]
        assert held.said == [(phase, step) for step in (2, 3, 4) for phase in phases]

    def test_an_overlapped_save_with_an_optimizer_with_a_closure_holds_its_step(self, ranks: Ranks):
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

    def test_an_overlapped_save_with_optimizers_that_take_turns_holds_its_step(self, ranks: Ranks):
        first, second = net(), net()
        optimizers = [adam(first), torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.5)]
        turns = count()

        def iterate() -> None:
            which = next(turns) % 2
            learn((first, second)[which], optimizers[which])

        one = start(ranks, *optimizers)
        assert_right(one, iterate, lambda: {"a": first.state_dict(), "b": whole(second, *optimizers)()}, steps=5)

    def test_an_optimizer_not_given_to_overlap_has_its_state_deferred_and_no_parameters(self, ranks: Ranks, held: Held):
        given, other = net(), net()
        optimizers = [adam(given), adam(other)]

        def iterate() -> None:
            learn(given, optimizers[0])
            learn(other, optimizers[1])

        one = start(ranks, optimizers[0])
        assert_right(one, iterate, lambda: {"a": given.state_dict(), "b": whole(other, *optimizers)()})
        optimizers[1].step()
        assert newest(one)[0] == 4 and held.said[-1] == ("overlap.notify", 4)

    def test_an_overlapped_save_with_a_compiled_step_holds_its_step(self, ranks: Ranks):
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

    @pytest.mark.parametrize("given", [[torch.nn.Linear(1, 1)], torch.nn.Linear(1, 1), True])
    def test_a_value_of_overlap_that_is_no_optimizer_is_refused(self, ranks: Ranks, given: Any):
        with pytest.raises(ConfigError, match=r"overlap is (a Linear|True|False)"):
            ranks.start(overlap=given)


class TestModels:
    def test_buffers_of_batch_norm_are_copied_before_the_next_forward(self, ranks: Ranks):
        """The next forward writes to them before the copy begins."""
        model = net()
        optimizer = adam(model)
        assert_right(
            start(ranks, optimizer),
            lambda: learn(model, optimizer),
            whole(model, optimizer),
            after_save=lambda: model(batch()),
        )

    def test_an_overlapped_save_of_averaged_weights_holds_its_step(self, ranks: Ranks):
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
    def test_an_overlapped_save_of_accumulated_gradients_holds_its_step(self, ranks: Ranks, to_none: bool):
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
            assert one.save_checkpoint(step, current, storage_type=StorageType.MEMORY)
            model(batch()).square().sum().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
                model(batch()).square().sum().backward()
            one.prepare(state())
            assert in_memory(one)[0] == step
            assert_same(in_memory(one)[1], wanted)

    @pytest.mark.parametrize("to_none", [True, False])
    def test_gradients_zeroed_right_after_an_overlapped_save_are_saved(self, ranks: Ranks, to_none: bool):
        model = net()
        optimizer = adam(model)

        def state() -> dict[str, Any]:
            return whole(model, optimizer)() | {"gradients": [p.grad for p in model.parameters()]}

        one = start(ranks, optimizer)
        zero = partial(optimizer.zero_grad, set_to_none=to_none)
        assert_right(one, lambda: learn(model, optimizer), state, after_save=zero)

    def test_a_tensor_lr_changed_right_after_an_overlapped_save_is_saved(self, ranks: Ranks):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        one = start(ranks, optimizer)
        assert_right(one, lambda: learn(model, optimizer), whole(model, optimizer), after_save=scheduler.step)


class Flat(torch.nn.Module):
    """Parameters and a buffer are parts of one storage, as some libraries lay them out."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(30)
        self.a = torch.nn.Parameter(flat[:10])
        self.b = torch.nn.Parameter(flat[10:20])
        self.register_buffer("mean", flat[20:])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.add_(1)
        return inputs.sum() * self.a.exp() + self.b


class Odd(torch.nn.Module):
    """A parameter that is not contiguous, one of no dimension, and one that is shared by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(3, 4).t())
        self.b = torch.nn.Parameter(torch.tensor(0.5))
        self.c = self.d = torch.nn.Parameter(torch.randn(5, 2)[:, :1])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ self.a).sum() * self.b + (self.c * self.d).sum()


class TestLayouts:
    @pytest.mark.parametrize("kind", [Flat, Odd])
    def test_an_overlapped_save_of_each_kind_of_layout_holds_its_step(
        self, ranks: Ranks, said: pytest.LogCaptureFixture, kind: type[torch.nn.Module]
    ):
        model = kind()
        optimizer = adam(model)
        state = whole(model, optimizer)
        one = start(ranks, optimizer)
        assert_right(one, lambda: learn(model, optimizer), state, after_save=lambda: model(batch()))
        assert "was written to" not in said.text

    def test_weights_that_are_in_the_state_twice_or_in_parts_are_saved(self, ranks: Ranks):
        model = net()
        optimizer = adam(model)

        def state() -> dict[str, Any]:
            weight = model[0].weight
            return whole(model, optimizer)() | {"row": weight[0], "again": weight.detach(), "list": [weight.data] * 2}

        one = start(ranks, optimizer)
        assert_right(one, lambda: learn(model, optimizer), state)

    def test_a_storage_is_deferred_only_if_no_part_of_it_changes(self):
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


WRITES: dict[str, Callable[[torch.nn.Sequential], object]] = {
    "clipped": lambda model: torch.no_grad()(lambda: model[0].weight.clamp_(-0.01, 0.01))(),
    "clipped all at once": lambda model: torch.no_grad()(lambda: torch._foreach_mul_(list(model.parameters()), 0.5))(),
    "loaded": lambda model: model.load_state_dict(net().state_dict()),
    "initialised": lambda model: torch.nn.init.zeros_(model[0].weight),
    "through a view": lambda model: model[0].weight.detach()[1].fill_(7),
}


def swap(model: torch.nn.Module) -> None:
    """As averaging libraries do before an evaluation."""
    for parameter in model.parameters():
        parameter.data.copy_(torch.full_like(parameter, 0.25))


def fused(model: torch.nn.Module) -> None:
    """The kernel of fused optimizers, called by itself: of what it writes no version rises."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    ones, steps = [torch.ones_like(each) for each in parameters], [torch.tensor(1.0) for _ in parameters]
    options = {"beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    torch._fused_adam_(parameters, ones, ones, ones, [], steps, lr=0.1, **options)


UNSEEN: dict[str, Callable[[torch.nn.Sequential], object]] = {
    "clipped by way of .data": lambda model: model[0].weight.data.clamp_(-0.01, 0.01),
    "swapped by way of .data": swap,
    "by numpy": lambda model: model[0].weight.detach().numpy().fill(7),
    "by another view of the memory": lambda model: torch.from_dlpack(model[0].weight.detach()).neg_(),
    "by a fused kernel": fused,
}


class TestChanges:
    """Weights that something else than an optimizer's step changes."""

    def test_writes_to_weights_before_the_save_lose_nothing(self, ranks: Ranks, said: pytest.LogCaptureFixture):
        model = net()
        optimizer = adam(model)

        def iterate() -> None:
            learn(model, optimizer)
            WRITES["clipped"](model)

        assert_right(start(ranks, optimizer), iterate, whole(model, optimizer))
        assert "was written to" not in said.text

    @pytest.mark.parametrize("write", WRITES | UNSEEN)
    def test_a_write_during_the_copy_loses_the_save_and_ends_overlap(
        self, ranks: Ranks, said: pytest.LogCaptureFixture, write: str
    ):
        model = net()
        optimizer = adam(model)
        one = start(ranks, optimizer)
        proven(one, optimizer, whole(model, optimizer))
        assert one.save_checkpoint(1, whole(model, optimizer)(), storage_type=StorageType.MEMORY).pending
        (WRITES | UNSEEN)[write](model)
        assert not said.records
        optimizer.step()
        warnings = [record.message for record in said.records if "overlap with" in record.message]
        assert len(warnings) == 1
        assert "state['model']['0.weight'] was written to between the save of step 1 and the next step" in warnings[0]
        assert "was not saved" in warnings[0] and newest(one)[0] == 0
        wanted = reference(whole(model, optimizer)())
        result = one.save_checkpoint(2, whole(model, optimizer)(), storage_type=StorageType.MEMORY)
        assert (result.saved, result.pending, result.skipped) == (True, False, 1)
        assert "step 1 of history 1 was not saved: state['model']['0.weight'] was written to" in result.trouble
        assert_same(in_memory(one), (2, wanted))
        assert one.save_checkpoint(3, whole(model, optimizer)(), storage_type=StorageType.MEMORY).trouble == ""

    def test_writes_in_each_forward_are_detected_before_any_save_is_lost(
        self, ranks: Ranks, said: pytest.LogCaptureFixture
    ):
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4, max_norm=0.1), torch.nn.Linear(4, 1))
        optimizer = adam(model)
        one = start(ranks, optimizer)
        for step in range(1, 5):
            optimizer.zero_grad()
            model(torch.arange(9)).sum().backward()
            optimizer.step()
            wanted = reference(whole(model, optimizer)())
            result = one.save_checkpoint(step, whole(model, optimizer)(), storage_type=StorageType.MEMORY)
            assert (result.saved, result.pending, result.skipped, result.trouble) == (True, False, 0, "")
            assert_same(in_memory(one), (step, wanted))
        assert said.text.count("state['model']['0.weight'] was written to") == 1

    def test_a_weight_replaced_during_the_copy_is_saved_with_its_old_value(self, ranks: Ranks):
        model = net()
        optimizer = adam(model)

        def replace() -> None:
            model[0].weight.data = model[0].weight.data.clamp(-0.01, 0.01)

        one = start(ranks, optimizer)
        assert_right(one, lambda: learn(model, optimizer), whole(model, optimizer), after_save=replace)

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_weights_moved_to_shared_memory_during_the_copy_are_saved(self, ranks: Ranks, elsewhere: bool):
        """Which frees the memory where they were. Queues do that in a thread of their own."""
        model = torch.nn.Linear(1500, 1500)
        optimizer = adam(model)
        one = start(ranks, optimizer)
        proven(one, optimizer, whole(model, optimizer))
        wanted = reference(whole(model, optimizer)())
        assert one.save_checkpoint(1, whole(model, optimizer)(), storage_type=StorageType.MEMORY).pending
        if elsewhere:
            queue = threading.Thread(target=model.share_memory)
            queue.start()
            queue.join()
        else:
            model.share_memory()
        assert_same(in_memory(one), (1, wanted))
        assert_right_after(one, model, optimizer)

    def test_an_operation_in_progress_as_the_copy_ends_loses_the_save_or_is_absent(self, ranks: Ranks, held: Held):
        """It shows only when it is over: then the save is lost, or it holds nothing of what was written."""
        model = torch.nn.Linear(2000, 2000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one = start(ranks, optimizer)
        proven(one, optimizer, whole(model, optimizer))
        writes = threading.Event()
        held.holds, held.on["overlap.copy"] = False, lambda: writes.wait(60)
        wanted = reference(whole(model, optimizer)())
        assert one.save_checkpoint(1, whole(model, optimizer)(), storage_type=StorageType.MEMORY).pending
        with torch.no_grad():
            writes.set()
            model.weight.exp_()
        optimizer.step()
        step, found = in_memory(one)
        if step == 1:
            assert_same(found, wanted)
        assert not one.save_checkpoint(2, whole(model, optimizer)(), storage_type=StorageType.MEMORY).pending


def assert_right_after(one: DdpCheckpointer, model: torch.nn.Module, optimizer: Optimizer) -> None:
    """What is shared is copied at once from now on, and torch has no cause to wait for it."""
    optimizer.step()
    wanted = reference(whole(model, optimizer)())
    result = one.save_checkpoint(2, whole(model, optimizer)(), storage_type=StorageType.MEMORY)
    assert (result.pending, result.skipped, result.trouble) == (True, 0, "")
    optimizer.step()
    assert_same(in_memory(one), (2, wanted))
    assert not torch.storage._share_memory_map


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCKPT_CHECK_OVERLAP", "1")


@pytest.mark.usefixtures("checked")
class TestChecked:
    """With FASTCKPT_CHECK_OVERLAP=1 what versions do not show is found, too."""

    def test_the_overlap_check_accepts_a_correct_loop(self, ranks: Ranks):
        model = net()
        optimizer = adam(model)
        one = start(ranks, optimizer)
        learn(model, optimizer)
        for step in range(3):
            wanted = reference(whole(model, optimizer)())
            assert one.save_checkpoint(step, whole(model, optimizer)(), storage_type=StorageType.MEMORY).pending
            learn(model, optimizer)
            assert_same(in_memory(one), (step, wanted))

    def test_the_overlap_check_raises_in_the_step_after_an_undetected_write(self, ranks: Ranks, held: Held):
        model = net()
        optimizer = adam(model)
        one = start(ranks, optimizer)
        held.holds = False
        learn(model, optimizer)
        one.save_checkpoint(1, whole(model, optimizer)(), storage_type=StorageType.MEMORY)
        model[3].bias.data.clamp_(-0.01, 0.01)
        with pytest.raises(OverlapError, match=r"state\['model'\]\['3.bias'\] changed between the save of step 1"):
            optimizer.step()
        assert newest(one) is None
        optimizer.step()
        result = one.save_checkpoint(2, whole(model, optimizer)(), storage_type=StorageType.MEMORY)
        assert result.skipped == 1 and "3.bias" in result.trouble

    def test_the_overlap_check_raises_after_a_write_that_was_undone(self, ranks: Ranks, held: Held):
        model = net()
        optimizer = adam(model)
        one = start(ranks, optimizer)
        learn(model, optimizer)
        weight = model[0].weight.data
        before = weight.clone()
        written, copied = threading.Event(), threading.Event()
        held.holds, held.on["overlap.copy"] = False, lambda: written.wait(60)
        one.save_checkpoint(1, whole(model, optimizer)(), storage_type=StorageType.MEMORY)
        weight.zero_()
        held.on["overlap.compare"] = copied.set
        written.set()
        assert copied.wait(60)
        weight.copy_(before)
        with pytest.raises(OverlapError, match=r"0.weight"):
            one.wait_latest_checkpoint()

    def test_the_overlap_check_raises_at_close_once_everything_is_closed(self, ranks: Ranks):
        model = net()
        optimizer = adam(model)
        one = start(ranks, optimizer)
        one.save_checkpoint(1, whole(model, optimizer)(), storage_type=StorageType.MEMORY)
        model[0].weight.data.zero_()
        with pytest.raises(OverlapError):
            one.close()
        one.close()
        optimizer.step()

    def test_the_overlap_check_raises_no_error_for_a_write_with_a_version(self, ranks: Ranks):
        model = net()
        optimizer = adam(model)
        one = start(ranks, optimizer)
        one.save_checkpoint(1, whole(model, optimizer)(), storage_type=StorageType.MEMORY)
        WRITES["clipped"](model)
        optimizer.step()
        assert not one.save_checkpoint(2, whole(model, optimizer)(), storage_type=StorageType.MEMORY).pending
