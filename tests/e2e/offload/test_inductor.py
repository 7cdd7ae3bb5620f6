"""Gradients of a model that inductor compiles to machine code are bitwise those of the same code without offloading."""

import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fastckpt.offload import ActivationOffload
from tests.e2e.offload.models import WIDTH, sequence

STEPS = 3
BUDGET = 4 << 20


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Compiles in this process, to a place of this test."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    # Donated buffers, a default of torch, are saved tensors in whose memory the compiled backward writes its results.
    import torch._functorch.config as functorch
    from torch._inductor import config

    # No trial compilations for each instruction set: they cost as much as the kernels.
    once = {"compile_threads": 1, "cpp.vec_isa_ok": True}
    with config.patch(once), functorch.patch(donated_buffer=True):
        yield
    torch._dynamo.reset()


def model() -> nn.Module:
    wide = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2))
    return nn.Sequential(*wide, nn.ReLU(inplace=True), nn.LayerNorm(WIDTH))


def gradients(run, weights, around, seed: int) -> list[torch.Tensor]:
    for weight in weights:
        weight.grad = None
    torch.manual_seed(seed)
    with around():
        loss = run(torch.cat((sequence(), sequence()))).square().mean()
    loss.backward()
    return [weight.grad for weight in weights]


def test_gradients_of_compiled_code_are_bitwise_those_without_offloading(compiler, tmp_path):
    from torch._inductor import metrics

    torch.manual_seed(7)
    made = model()
    weights = list(made.parameters())
    run = torch.compile(made, backend="inductor", dynamic=False, fullgraph=True)
    place = tmp_path / "scratch"
    place.mkdir()
    offload = ActivationOffload(place, budget=BUDGET)
    before = metrics.generated_kernel_count
    for step in range(STEPS):
        # The compiled code of the first one without offloading serves all: another would round otherwise.
        want = gradients(run, weights, nullcontext, step)
        found = gradients(run, weights, lambda: offload, step)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want, strict=True)), step
    assert metrics.generated_kernel_count > before, "nothing was compiled"
    report = offload.report()
    assert report.written > 2 * BUDGET and report.read > BUDGET, report
    assert report.wrote.planned is not None and not report.failure
