"""The same on a GPU: bitwise gradients, less memory, changes in place noticed, streams of the training respected."""

from contextlib import nullcontext

import pytest
import torch

from fastckpt.offload import ActivationOffload
from tests.e2e.offload.models import layer

pytestmark = pytest.mark.gpu

BUDGET = 64 << 20
WIDTH, LENGTH, BATCH = 256, 512, 16


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


def gradients(model, around, device, seed=0):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    batch = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    with around():
        loss = model(batch).square().mean()
    loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]


def peak_of(run) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_on_a_gpu_are_bitwise_those_without_offloading_in_less_memory(device, tmp_path, dtype):
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = torch.nn.Sequential(*(layer() for _ in range(8))).to(device, torch.float32)
    offload = ActivationOffload(tmp_path, budget=BUDGET)
    cast = (lambda: torch.autocast("cuda", dtype)) if dtype != torch.float32 else nullcontext

    def plain():
        with cast():
            return gradients(model, nullcontext, device)

    def offloaded():
        with cast():
            return gradients(model, lambda: offload, device)

    want = plain()
    for _ in range(3):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(offloaded(), want, strict=True))
    report = offload.report()
    assert report.written > BUDGET and not report.failure
    assert peak_of(offloaded) < 0.6 * peak_of(plain)


def test_a_tensor_on_a_gpu_that_is_changed_in_place_raises(device, tmp_path):
    offload = ActivationOffload(tmp_path, budget=BUDGET)
    leaf = torch.ones(1024, 1024, device=device, requires_grad=True)
    with offload:
        value = leaf.exp()
        loss = value.sum()
    with torch.no_grad():
        value.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_forward_on_a_stream_of_its_own_is_written_after_it_was_computed(device, tmp_path):
    offload = ActivationOffload(tmp_path, budget=4 << 20)
    leaf = torch.randn(2048, 2048, device=device, requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # what is saved is computed long after it was packed
        with offload:
            value = leaf
            for _ in range(6):
                value = (value * 1.01).exp().tanh()
            loss = value.sum()
        loss.backward()
    stream.synchronize()
    other = leaf.detach().clone().requires_grad_()
    value = other
    for _ in range(6):
        value = (value * 1.01).exp().tanh()
    value.sum().backward()
    assert torch.equal(leaf.grad, other.grad)
