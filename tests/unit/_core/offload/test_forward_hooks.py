"""Tensors that autograd saves come back as they were, or an error does: changes in place, weights, views, order."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fastckpt._core import metrics
from fastckpt._core.offload import activation_store
from fastckpt._core.offload.forward_hooks import ForwardHooks
from fastckpt._core.offload.packed_tensor import LeftTensor, PackedTensor
from fastckpt._core.offload.transfers import RateMeter
from fastckpt.offload import ActivationOffload
from tests.unit._core.offload.conftest import held, phases, settle, store_of

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


def exp_of(offload: ActivationOffload, leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A value that its own backward needs, and the loss."""
    with offload:
        value = leaf.exp()
        return value, value.sum()


def raises_once_changed(loss: torch.Tensor, match: str = "modified by an inplace operation") -> None:
    with pytest.raises(RuntimeError, match=match):
        loss.backward()


def double(value: torch.Tensor) -> None:
    with torch.no_grad():
        value.mul_(2)


# --- rule 1: no silent wrong gradients


def stored(offload, value):
    settle(offload)
    double(value)


def on_the_way(offload, value):
    double(value)


@pytest.mark.parametrize(("when", "side"), [(stored, SIDE), (on_the_way, SIDE), (on_the_way, 8)])
def test_a_tensor_that_is_changed_in_place_before_its_backward_raises_autograds_own_error(offload, when, side):
    leaf, texts = torch.ones(side, side, requires_grad=True), []
    for around in (nullcontext(), offload):
        value, loss = exp_of(around, leaf)
        when(offload, value)
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        texts.append(str(error.value))
    common = texts[0].split(" Hint")[0]
    assert common in texts[1] and f"[{side}, {side}]" in common and "Exp" in common
    assert 'consistency="copy"' in texts[1]


def test_the_error_of_a_changed_weight_does_not_advise_copies_since_weights_are_not_copied(tmp_path):
    offload = ActivationOffload(tmp_path, budget="64MiB", consistency="copy")
    weight = torch.nn.Parameter(torch.ones(SIDE, SIDE))
    with offload:
        loss = (torch.ones(SIDE, SIDE, requires_grad=True) @ weight).sum()
    double(weight)
    raises_once_changed(loss, r"as optimizer\.step\(\) changes weights\.$")


def test_a_tensor_that_is_changed_while_it_is_written_raises(offload):
    """The writer is held where the bytes are about to leave, and finds the changed ones."""
    with held("offload.write") as gate:
        value, loss = exp_of(offload, torch.ones(SIDE, SIDE, requires_grad=True))
        gate.wait_for(1)
        double(value)
    settle(offload)
    raises_once_changed(loss)


def test_a_tensor_that_was_planned_to_stay_and_is_changed_raises(offload):
    leaf = torch.ones(SIDE, SIDE, requires_grad=True)
    _, loss = exp_of(offload, leaf)
    settle(offload)
    loss.backward()
    value, loss = exp_of(offload, leaf)
    settle(offload)
    assert mebibytes(offload.report().written) == 1, "the second one stays"
    double(value)
    raises_once_changed(loss)


@pytest.mark.parametrize(("when", "side"), [(on_the_way, 8), (on_the_way, SIDE), (stored, SIDE)])
def test_with_copies_the_values_are_those_of_the_time_of_saving(tmp_path, when, side):
    offload = ActivationOffload(tmp_path, budget="64MiB", consistency="copy")
    leaf = torch.ones(side, side, requires_grad=True)
    value, loss = exp_of(offload, leaf)
    when(offload, value)
    assert torch.equal(gradients(loss, leaf)[0], torch.ones(side, side).exp())


def test_memory_that_is_freed_before_it_is_written_and_filled_again_stays(offload):
    """As a gathered weight that came as a plain tensor: there is nothing to read in between."""
    leaf = square(requires_grad=True)
    with held("offload.write") as gate, offload:
        values = [leaf.exp(), leaf.tanh(), leaf.sigmoid()]
        loss = sum(value.sum() for value in values)
        gate.wait_for(2)  # both threads: the third tensor waits
        last = values[2].detach()
        content = last.clone()
        size = last.untyped_storage().nbytes()
        last.untyped_storage().resize_(0)
    settle(offload)
    last.untyped_storage().resize_(size)
    with torch.autograd._unsafe_preserve_version_counter(last):
        last.copy_(content)
    found = gradients(loss, leaf)[0]
    plain = gradients(leaf.exp().sum() + leaf.tanh().sum() + leaf.sigmoid().sum(), leaf)[0]
    assert torch.equal(found, plain)
    report = offload.report()
    assert mebibytes(report.written) == 2 and not report.failure


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


def packed_by(offload, run) -> list[object]:
    """What the hooks put in the place of each tensor that is saved."""
    made, original = [], ForwardHooks.pack

    def pack(self, tensor):
        made.append(original(self, tensor))
        return made[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ForwardHooks, "pack", pack)
        with offload:
            kept = run()
    del kept
    return made


def test_all_weights_of_a_layer_are_left_alone_also_those_that_it_saves_as_views(offload):
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    inputs = torch.randn(4, 256, 512, requires_grad=True)
    made = packed_by(offload, lambda: layer(inputs))
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    left = [each.tensor for each in made if isinstance(each, LeftTensor)]
    of_weights = [tensor for tensor in left if tensor.untyped_storage().data_ptr() in weights]
    assert len(of_weights) == 8 and sum(not isinstance(tensor, nn.Parameter) for tensor in of_weights) == 4
    taken = [each.saved for each in made if isinstance(each, PackedTensor)]
    assert len(taken) >= 4
    identities = {each[0] for each in offload._offloader._identities._refs}
    assert not identities & {weight.untyped_storage()._cdata for weight in layer.parameters()}


class Tagged(torch.Tensor):
    """A class that nothing is known of."""


def test_small_tensors_and_those_of_unknown_classes_are_left_alone(offload):
    leaf = square(requires_grad=True)
    tagged = square().as_subclass(Tagged)
    small = torch.randn(SIDE, SIDE - 1)
    made = packed_by(offload, lambda: (leaf * tagged, small.requires_grad_().exp().exp()))
    assert [type(each) for each in made] == [LeftTensor] * len(made) and len(made) >= 3
    assert offload.report().written == 0


# --- rule 3: a storage is written once


def test_a_storage_is_written_once_however_many_views_of_it_are_saved(offload):
    """As queries, keys and values are views of what one layer gives."""
    leaf = torch.randn(SIDE, 3 * SIDE, requires_grad=True)

    def run():
        q, k, v = (leaf * 1.5).split(SIDE, 1)
        return ((q * k) * v).sum()

    with offload:
        loss = run()
    settle(offload)
    assert mebibytes(offload.report().written) == 3 + 1, "the common storage, and the first product"
    assert torch.equal(gradients(loss, leaf)[0], gradients(run(), leaf)[0])


def test_a_storage_with_several_views_is_read_once_although_memory_is_short(tmp_path):
    """What is read ahead in the middle of a node must not take the place of what that node still needs."""
    offload = ActivationOffload(tmp_path, budget="8MiB")
    leaf = torch.randn(SIDE, SIDE, requires_grad=True)

    def run():
        x = leaf
        for _ in range(6):
            q, k, v = torch.cat((x, x * 0.5, x * 0.25), 1).tanh().split(SIDE, 1)
            x = torch.lerp(q, k, v)
        return x.sum()

    with offload:
        loss = run()
    settle(offload)
    found = gradients(loss, leaf)[0]
    report = offload.report()
    assert 0 < report.read <= report.written
    assert torch.equal(found, gradients(run(), leaf)[0])


def test_a_view_that_reaches_over_less_than_half_of_its_storage_is_written_alone(offload):
    leaf = nn.Parameter(torch.randn(8, SIDE, SIDE))
    with offload:
        value = leaf * 1.5
        loss = value[2].exp().sum() * 0 + (value[1:3] ** 3).sum()
    settle(offload)
    assert mebibytes(offload.report().written) == 3, "the result of exp, and two eighths of the base of the power"
    del value
    found = gradients(loss, leaf)[0]
    plain = leaf * 1.5
    assert torch.equal(found, gradients(plain[2].exp().sum() * 0 + (plain[1:3] ** 3).sum(), leaf)[0])


def test_a_storage_that_lives_on_after_it_was_written_is_not_written_again(offload):
    leaf = square(requires_grad=True)
    with offload:
        value = leaf.exp()
        loss = value.sum()
        settle(offload)
        loss = loss + (value**2).sum() + (value**3).sum()
    settle(offload)
    assert mebibytes(offload.report().written) == 1
    plain = leaf.exp()
    expected = gradients(plain.sum() + (plain**2).sum() + (plain**3).sum(), leaf)
    assert torch.equal(gradients(loss, leaf)[0], *expected)


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


def test_an_address_that_recurs_is_not_taken_for_the_storage_that_was_there(offload):
    leaf = square(requires_grad=True)

    def run():
        losses = []
        for factor in range(1, 13):
            value = leaf * factor
            losses.append((value**2).sum() * factor)
            del value
            if factor % 3 == 0:
                settle(offload)
        return sum(losses)

    with offload:
        loss = run()
    assert torch.equal(gradients(loss, leaf)[0], gradients(run(), leaf)[0])


# --- rule 4: a region is free when its tensor is


def some_loss(leaf: torch.Tensor) -> torch.Tensor:
    value = leaf
    for _ in range(6):
        value = (value * 1.01).exp().tanh()
    return value.sum()


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
        some_loss(leaf)
        raise ZeroDivisionError


def raise_in_the_backward(offload, leaf, loss):
    value = loss * 2
    inner = value.grad_fn.next_functions[0][0].next_functions[0][0]
    inner.register_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        value.backward()


ENDS = {
    "a backward": lambda offload, leaf, loss: loss.backward(),
    "none": lambda *_: None,
    "an error in the forward": raise_in_the_forward,
    "an error in the backward": raise_in_the_backward,
    "two backwards": lambda offload, leaf, loss: (loss.backward(retain_graph=True), loss.backward()),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_regions_are_free_after_each_end_of_a_graph_and_the_file_does_not_grow(tmp_path, end):
    offload = ActivationOffload(tmp_path, budget="4MiB")
    leaf = square(requires_grad=True)
    lengths = []
    for _ in range(4):
        with offload:
            loss = some_loss(leaf)
        settle(offload)
        assert used(offload) >= 6 * MIB
        end(offload, leaf, loss)
        leaf.grad = loss = None
        assert used(offload) == 0
        lengths.append(store_of(offload).file.length)
    offload.report()
    assert store_of(offload).resident == 0
    assert lengths == [lengths[0]] * 4 and lengths[0] <= 25 * MIB


def test_a_second_derivative_is_that_without_offloading(offload):
    leaf = square(requires_grad=True)

    def second(loss):
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad((first**2).sum(), leaf)[0]

    with offload:
        loss = some_loss(leaf)
    settle(offload)
    assert torch.equal(second(loss), second(some_loss(leaf)))


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


# --- rule 5: how much is on the way


@pytest.fixture
def fast_disk(monkeypatch):
    """Plans count on transfers that take no time, so they choose in the order of the forward on any machine."""
    monkeypatch.setattr(RateMeter, "rate", 1e18)


def test_a_forward_waits_while_a_quarter_of_the_budget_is_on_the_way(tmp_path):
    offload = ActivationOffload(tmp_path, budget="16MiB")
    store, leaf, most = store_of(offload), square(requires_grad=True), []
    done = threading.Event()

    def forward():
        with offload:
            losses.append(some_loss(leaf))
        done.set()

    losses: list[torch.Tensor] = []
    with held("offload.write") as gate, phases() as seen:
        thread = threading.Thread(target=forward)
        thread.start()
        gate.wait_for(2)
        while not [name for name, _ in seen if name == "offload.wait_for_writes"]:
            assert thread.is_alive()
        most.append(store.in_flight)
        assert not done.is_set()
        gate.open()
        thread.join(60)
    assert most == [4 * MIB]
    assert torch.equal(gradients(losses[0], leaf)[0], gradients(some_loss(leaf), leaf)[0])
    assert offload.report().peak <= 16 * MIB + MIB and offload.report().waited_for_writes > 0


def test_what_is_needed_while_it_is_on_the_way_is_handed_back_from_memory(offload):
    leaf = square(requires_grad=True)
    with held("offload.write") as gate:
        with offload:
            loss = some_loss(leaf)
        gate.wait_for(1)
        found = gradients(loss, leaf)[0]
    settle(offload)
    assert torch.equal(found, gradients(some_loss(leaf), leaf)[0])
    report = offload.report()
    assert report.read == 0 and mebibytes(report.written) <= activation_store.THREADS


def test_what_the_last_layers_save_is_not_written(tmp_path, fast_disk):
    offload = ActivationOffload(tmp_path, budget="8MiB")
    leaf = square(requires_grad=True)
    plain = gradients(some_loss(leaf), leaf)[0]
    for _ in range(3):
        with offload:
            loss = some_loss(leaf)
        settle(offload)
        places = [entry.saved().place for entry in offload._offloader._passes[-1].entries]
        assert torch.equal(gradients(loss, leaf)[0], plain)
    resident = [place.name == "RESIDENT" for place in places]
    assert resident == [False] * resident.index(True) + [True] * sum(resident), "those that stay are the last ones"
    assert len(resident) == 12 and sum(resident) == 6, "three quarters of the budget"


# --- rule 6: what is fetched ahead, in which order


class Save(torch.autograd.Function):
    """A node that saves several tensors, and needs all of them at once."""

    @staticmethod
    def forward(ctx, value, *saved):
        ctx.save_for_backward(*saved)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        first = [each.flatten()[0].item() for each in ctx.saved_tensors]
        return gradient * sum(first), *(None for _ in first)


def chain(value: torch.Tensor, numbers: range, each: int) -> torch.Tensor:
    """Nodes that save so many tensors each; the n-th tensor has n pages more than a MiB."""
    for first in numbers[::each]:
        value = Save.apply(value, *(torch.full((MIB // 4 + 1024 * n,), 1.0 + n) for n in range(first, first + each)))
    return value


def number_of(size: object) -> int:
    return (int(size) - MIB) // 4096


@pytest.fixture
def one_reader(monkeypatch):
    monkeypatch.setattr(activation_store, "THREADS", 1)


def test_what_is_needed_next_is_read_ahead_node_by_node_from_the_last_one_on(tmp_path, one_reader):
    offload = ActivationOffload(tmp_path, budget="8MiB")
    leaf = torch.ones(1, requires_grad=True)
    with offload:
        loss = chain(leaf, range(15), each=3).sum()
    settle(offload)
    ahead, enough = [], threading.Event()

    def observe(phase, fields):
        if phase == "offload.read" and threading.current_thread() is threading.main_thread():
            assert enough.wait(60), ahead  # the first one, which the backward reads by itself
        elif phase == "offload.read":
            ahead.append(number_of(fields["bytes"]))
            if len(ahead) == 6:
                enough.set()

    metrics.observe(observe)
    try:
        found = gradients(loss, leaf)[0]
    finally:
        metrics.unobserve(observe)
    assert ahead[:6] == [13, 14, 9, 10, 11, 6]
    assert torch.equal(found, gradients(chain(leaf, range(15), each=3).sum(), leaf)[0])
    assert offload.report().peak <= 8 * MIB + 2 * MIB


def test_later_steps_read_ahead_in_the_order_of_the_first_one(tmp_path, fast_disk):
    """Here the first of two graphs goes backward first, which the order of nodes would not tell."""
    offload = ActivationOffload(tmp_path, budget="16MiB")
    leaf = torch.ones(1, requires_grad=True)
    for _ in range(2):
        with offload:
            first, second = chain(leaf, range(16), each=2).sum(), chain(leaf, range(16, 32), each=2).sum()
        settle(offload)
        with phases() as seen:
            first.backward()
            assert used(offload)
        second.backward()
    numbers = {number_of(fields["bytes"]) for name, fields in seen if name == "offload.read"}
    assert max(numbers) >= 16, "what the second graph needs is read while the first one goes backward"


def test_steps_that_differ_are_profiled_once_each_and_each_has_its_plan(tmp_path, fast_disk):
    offload = ActivationOffload(tmp_path, budget="8MiB")
    planned = []
    listener = planned.append
    metrics.listen(listener)
    try:
        written = []
        for side in (SIDE, SIDE, 2 * SIDE, 2 * SIDE, SIDE, 2 * SIDE):
            leaf = torch.randn(SIDE, side, requires_grad=True)
            before = offload.report().written
            with offload:
                loss = some_loss(leaf)
            settle(offload)
            assert torch.equal(gradients(loss, leaf)[0], gradients(some_loss(leaf), leaf)[0])
            written.append((offload.report().written - before) // MIB)
    finally:
        metrics.unlisten(listener)
    assert len([each for each in planned if each["event"] == "offload_planned"]) == 2
    assert written == [12, 6, 24, 18, 6, 18]


def test_a_step_that_differs_in_its_middle_offloads_the_rest(tmp_path, fast_disk):
    offload = ActivationOffload(tmp_path, budget="8MiB")
    leaf = torch.randn(SIDE, SIDE, requires_grad=True)

    def run(wider: bool) -> torch.Tensor:
        return some_loss(leaf) + some_loss(torch.cat((leaf, leaf)) if wider else leaf)

    for wider in (False, True, True):
        before = offload.report().written
        with offload:
            loss = run(wider)
        settle(offload)
        assert torch.equal(gradients(loss, leaf)[0], gradients(run(wider), leaf)[0])
        written = (offload.report().written - before) // MIB
    assert written == 36 - 6


def test_the_first_step_measures_what_compression_takes_where_it_would_gain(offload):
    """Else a plan would compress on a processor that is slower than the disk."""
    measured = {}
    for name, function, rows in (("dense", torch.sigmoid, SIDE), ("sparse", torch.relu, 2 * SIDE)):
        leaf = torch.randn(rows, SIDE, requires_grad=True)  # of another size: another step
        with offload:
            loss = function(leaf).sum()
        settle(offload)
        measured[name] = offload._offloader._passes[-1].profile(1e9, 1e9)
        loss.backward()
    assert measured["dense"].encode_rate == measured["dense"].decode_rate == float("inf")
    sparse = measured["sparse"]
    assert 0 < sparse.encode_rate < float("inf") and 0 < sparse.decode_rate < float("inf")
    assert min(tensor.ratio for tensor in sparse.tensors) < 0.6


# --- rule 7: the end of offloading


def test_what_still_waits_when_a_write_has_failed_is_not_written(offload):
    leaf = square(requires_grad=True)
    with held("offload.write") as gate:
        with offload:
            loss = some_loss(leaf)
        gate.wait_for(2)  # both threads: the other tensors wait
        store = store_of(offload)
        with store._moved:
            store._end(OSError(28, "No space left on device"))
    settle(offload)
    report = offload.report()
    assert mebibytes(report.written) == 2 and "No space left" in report.failure
    assert torch.equal(gradients(loss, leaf)[0], gradients(some_loss(leaf), leaf)[0])


def test_a_disk_that_does_not_answer_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(activation_store, "STALLED", 0.2)
    offload = ActivationOffload(tmp_path, budget="4MiB")
    leaf = square(requires_grad=True)
    with held("offload.write") as gate, phases() as seen:
        with offload:
            loss = some_loss(leaf)
        gate.wait_for(1)
        waits = [name for name, _ in seen if name == "offload.wait_for_writes"]
        assert len(waits) == 1 and "no write was completed" in offload.report().failure
    settle(offload)
    assert torch.equal(gradients(loss, leaf)[0], gradients(some_loss(leaf), leaf)[0])


# --- tensors without memory of their own


def layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()) for _ in range(3)])


@pytest.mark.parametrize("options", [{"budget": "4MiB"}, {"budget": "4MiB", "consistency": "copy"}])
def test_forward_derivatives_have_zeros_without_memory_and_are_as_without_offloading(tmp_path, options):
    model, inputs = layers(), (square(), square())

    def loss() -> torch.Tensor:
        primal, tangent = torch.func.jvp(model, inputs[:1], inputs[1:])
        return (primal * tangent).mean()

    expected = gradients(loss(), *model.parameters())
    with ActivationOffload(tmp_path, **options):
        found = loss()
    assert all(map(torch.equal, gradients(found, *model.parameters()), expected))


def test_a_linearized_function_is_as_without_offloading(tmp_path):
    model, inputs, direction = layers(), square(), square()
    _, derivative = torch.func.linearize(model, inputs)
    with ActivationOffload(tmp_path, budget="4MiB"):
        _, found = torch.func.linearize(model, inputs)
    assert torch.equal(found(direction), derivative(direction))


@pytest.mark.parametrize("shape", [(1, 64), (1, 1)])
def test_a_small_expanded_tensor_is_copied_with_its_strides(tmp_path, shape):
    leaf, mask = torch.randn(64, 64, requires_grad=True), torch.rand(shape).expand(64, 64)
    with ActivationOffload(tmp_path, budget="4MiB", consistency="copy"):
        loss = (leaf * mask).sum()
        node = loss.grad_fn.next_functions[0][0]
        assert node._saved_other.stride() == mask.stride()
    expected = mask.clone()
    mask.as_strided((1,), (1,)).fill_(7)
    assert torch.equal(gradients(loss, leaf)[0], expected)
