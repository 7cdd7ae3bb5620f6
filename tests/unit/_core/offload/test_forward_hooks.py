"""Tensors that autograd saves come back as they were, or an error does: changes in place, freed memory, ends."""

import gc
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt._core import metrics
from fastckpt._core.offload import activation_store
from fastckpt._core.offload.transfers import RateMeter
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.losses import some_loss
from tests.unit._core.offload.conftest import held, settle, store_of

MIB = 1 << 20
SIDE = 512
"""A square of floats with this side has a MiB."""


def square(**options) -> torch.Tensor:
    return torch.randn(SIDE, SIDE, **options)


def mebibytes(written: int) -> int:
    """Of bytes in the file, where each tensor may take a page more."""
    return written // MIB


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, inputs))


def exp_of(offload: AbstractContextManager[Any], leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A value that its own backward needs, and the loss."""
    with offload:
        value = leaf.exp()
        return value, value.sum()


def double(value: torch.Tensor) -> None:
    with torch.no_grad():
        value.mul_(2)


# --- rule 1: no silent wrong gradients


def at_once(offload: ActivationOffload, leaf: torch.Tensor) -> torch.Tensor:
    value, loss = exp_of(offload, leaf)
    double(value)
    return loss


def stored(offload: ActivationOffload, leaf: torch.Tensor) -> torch.Tensor:
    value, loss = exp_of(offload, leaf)
    settle(offload)
    double(value)
    return loss


def being_written(offload: ActivationOffload, leaf: torch.Tensor) -> torch.Tensor:
    """The writer is held where the bytes are about to leave, and finds the changed ones."""
    with held("offload.write") as gate:
        value, loss = exp_of(offload, leaf)
        gate.wait_for(1)
        double(value)
    settle(offload)
    return loss


def planned_to_stay(offload: ActivationOffload, leaf: torch.Tensor) -> torch.Tensor:
    _, loss = exp_of(offload, leaf)
    settle(offload)
    loss.backward()
    loss = stored(offload, leaf)
    assert mebibytes(offload.report().written) == 1, "the second one stays"
    return loss


@pytest.mark.parametrize(
    ("changed", "side"), [(at_once, 8), (stored, SIDE), (being_written, SIDE), (planned_to_stay, SIDE)]
)
def test_a_tensor_that_is_changed_in_place_before_its_backward_raises_autograds_own_error(offload, changed, side):
    leaf = torch.ones(side, side, requires_grad=True)
    value, own = exp_of(nullcontext(), leaf)
    double(value)
    texts = []
    for loss in (own, changed(offload, leaf)):
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        texts.append(str(error.value))
    common = texts[0].split(" Hint")[0]
    assert common in texts[1] and f"[{side}, {side}]" in common and "Exp" in common
    assert 'consistency="copy"' in texts[1]


@pytest.mark.parametrize(("changed", "side"), [(at_once, 8), (stored, SIDE)])
def test_with_copies_the_values_are_those_of_the_time_of_saving(tmp_path, changed, side):
    leaf = torch.ones(side, side, requires_grad=True)
    loss = changed(ActivationOffload(tmp_path, budget="64MiB", consistency="copy"), leaf)
    assert torch.equal(gradients(loss, leaf)[0], torch.ones(side, side).exp())


def test_memory_that_is_freed_while_it_is_written_does_not_end_the_offloading(offload):
    leaf = square(requires_grad=True)
    with held("offload.write") as gate:
        value, loss = exp_of(offload, leaf)
        gate.wait_for(1)
        content, size = value.detach().clone(), value.untyped_storage().nbytes()
        value.untyped_storage().resize_(0)
    settle(offload)
    value.untyped_storage().resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(value):
        value.copy_(content)
    assert torch.equal(gradients(loss, leaf)[0], leaf.detach().exp())
    assert offload.report().failure == ""


class OverwritingSquare(torch.autograd.Function):
    """Its backward writes to what it saved, as kernels do that have gradients in the place of activations."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return value.mul_(2).mul_(gradient)


@pytest.mark.parametrize("options", [{"budget": "64MiB"}, {"budget": "64MiB", "consistency": "copy"}, {}])
@pytest.mark.parametrize("again", [True, False])
def test_what_a_backward_has_written_to_is_not_handed_out_once_more(tmp_path, options, again):
    """In a second backward, or to another node: autograd raises its error without offloading, too."""
    leaf = torch.ones(SIDE, SIDE, requires_grad=True)

    def loss() -> torch.Tensor:
        value = leaf * 1 if again else leaf.exp()  # exp saves its result, as its square does
        return OverwritingSquare.apply(value).sum()

    def go(made: torch.Tensor) -> None:
        made.backward(retain_graph=again)
        if again:
            made.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        go(loss())
    offload = ActivationOffload(tmp_path, **options)
    for _ in range(2):  # the second one by a plan: all stays in memory
        with offload:
            made = loss()
        settle(offload)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            go(made)


def test_memory_that_is_filled_from_outside_of_torch_is_saved_as_it_is_in_each_forward(offload):
    """As a buffer that a loader refills: no version tells of it, and the graph of an earlier forward still lives."""
    batch, weight, graphs = torch.zeros(SIDE, SIDE), square(requires_grad=True), []
    for number in range(1, 4):
        batch.numpy()[:] = number
        with offload:
            graphs.append((weight * batch).sum())
        settle(offload)
        (found,) = torch.autograd.grad(graphs[-1], weight, retain_graph=True)
        assert torch.equal(found, batch)


# --- rule 2: what is left alone


class Tagged(torch.Tensor):
    """A class that nothing is known of."""


def test_small_tensors_and_those_of_unknown_classes_are_left_alone(offload):
    leaf = square(requires_grad=True)
    tagged = square().as_subclass(Tagged)
    small = torch.randn(SIDE, SIDE - 1)
    with offload:
        kept = leaf * tagged, small.requires_grad_().exp().exp()
    settle(offload)
    assert kept and offload.report().written == 0


# --- rule 3: what was changed is another one


def test_a_storage_that_was_changed_between_two_saves_is_written_twice(offload):
    leaf = square(requires_grad=True)
    with offload:
        value = leaf * 2
        first = (value**3).sum()
        settle(offload)
        double(value)
        second = (value**3).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(first, leaf)
    assert torch.equal(gradients(second, leaf)[0], 3 * (4 * leaf.detach()) ** 2 * 2)


# --- rule 4: a region is free when its tensor is


def used(offload) -> int:
    """Bytes of regions that are in use, once no thread transfers any."""
    gc.collect()
    store = store_of(offload)
    for pool in (store._writers, store._readers):
        all_idle = threading.Barrier(activation_store.THREADS)
        for each in [pool.submit(all_idle.wait, 60) for _ in range(activation_store.THREADS)]:
            each.result(60)
    settle(offload)
    return store.file.used


def raise_in_the_forward(offload, leaf, loss):
    with pytest.raises(ZeroDivisionError), offload:
        some_loss(leaf, 6)
        raise ZeroDivisionError


def raise_in_the_backward(offload, leaf, loss):
    value = loss * 2
    inner = value.grad_fn.next_functions[0][0].next_functions[0][0]
    inner.register_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        value.backward()


def backward(offload, leaf, loss):
    loss.backward()


@pytest.mark.parametrize("end", [backward, raise_in_the_forward, raise_in_the_backward])
def test_regions_are_free_after_each_end_of_a_graph_and_the_file_does_not_grow(tmp_path, end):
    offload = ActivationOffload(tmp_path, budget="4MiB")
    leaf = square(requires_grad=True)
    lengths = []
    for _ in range(4):
        with offload:
            loss = some_loss(leaf, 6)
        settle(offload)
        assert used(offload) >= 6 * MIB
        end(offload, leaf, loss)
        leaf.grad = loss = None
        assert used(offload) == 0
        lengths.append(store_of(offload).file.length)
    offload.report()
    assert store_of(offload).resident == 0
    assert lengths == [lengths[0]] * 4 and lengths[0] <= 25 * MIB


@pytest.mark.parametrize("side", [8, SIDE])
def test_a_graph_that_is_dropped_is_freed_although_its_nodes_saved_their_own_results(offload, side):
    leaf = torch.randn(side, side, requires_grad=True)

    def hook(*_):
        pass

    with offload:
        value = leaf.exp()
        value.grad_fn.register_hook(hook)
    alive = weakref.ref(hook)
    del hook, value
    assert alive() is None


# --- rule 5: each kind of step has a plan


def test_steps_that_differ_are_profiled_once_each_and_each_has_its_plan(tmp_path, monkeypatch):
    """Plans count on transfers that take no time, so they choose in the order of the forward on any machine."""
    monkeypatch.setattr(RateMeter, "rate", 1e18)
    offload, planned, written = ActivationOffload(tmp_path, budget="8MiB"), [], []
    metrics.listen(listener := planned.append)
    try:
        for side in (SIDE, SIDE, 2 * SIDE, 2 * SIDE, SIDE, 2 * SIDE):
            leaf = torch.randn(SIDE, side, requires_grad=True)
            before = offload.report().written
            with offload:
                loss = some_loss(leaf, 6)
            settle(offload)
            assert torch.equal(gradients(loss, leaf)[0], gradients(some_loss(leaf, 6), leaf)[0])
            written.append((offload.report().written - before) // MIB)
    finally:
        metrics.unlisten(listener)
    assert len([each for each in planned if each["event"] == "offload_planned"]) == 2
    assert written == [12, 6, 24, 18, 6, 18]


# --- rule 6: the end of offloading


def test_a_disk_that_does_not_answer_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(activation_store, "STALLED", 0.2)
    offload = ActivationOffload(tmp_path, budget="4MiB")
    leaf = square(requires_grad=True)
    with held("offload.write") as gate, held("offload.wait_for_writes") as waits:
        waits.open()
        with offload:
            loss = some_loss(leaf, 6)
        gate.wait_for(1)
        assert waits.entered == 1 and "no write was completed" in offload.report().failure
    settle(offload)
    assert torch.equal(gradients(loss, leaf)[0], gradients(some_loss(leaf, 6), leaf)[0])


# --- tensors without memory of their own


def test_forward_derivatives_have_zeros_without_memory_and_are_as_without_offloading(tmp_path):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()) for _ in range(3)])
    inputs = square(), square()

    def loss() -> torch.Tensor:
        primal, tangent = torch.func.jvp(model, inputs[:1], inputs[1:])
        return (primal * tangent).mean()

    expected = gradients(loss(), *model.parameters())
    with ActivationOffload(tmp_path, budget="4MiB", consistency="copy"):
        found = loss()
    assert all(map(torch.equal, gradients(found, *model.parameters()), expected))


def test_a_small_expanded_tensor_is_copied_with_its_strides(tmp_path):
    leaf, mask = torch.randn(64, 64, requires_grad=True), torch.rand(1, 64).expand(64, 64)
    with ActivationOffload(tmp_path, budget="4MiB", consistency="copy"):
        loss = (leaf * mask).sum()
        node = loss.grad_fn.next_functions[0][0]
        assert node._saved_other.stride() == mask.stride()
    expected = mask.clone()
    mask.as_strided((1,), (1,)).fill_(7)
    assert torch.equal(gradients(loss, leaf)[0], expected)
