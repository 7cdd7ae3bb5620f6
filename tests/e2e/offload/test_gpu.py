"""The same on a GPU: bitwise gradients, less memory, streams respected, by either way to the disk.

None of these has run yet: no GPU was there. Tests with GPUDirect Storage skip where fastckpt says that there is none.
"""

import copy
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastckpt._core.byte_sizes import parsed
from fastckpt._core.offload import forward_hooks
from fastckpt._core.offload.scratch_file import ScratchFile
from fastckpt._core.offload.transfers import Transfers
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.losses import settled
from tests.e2e.offload.models import Checkpointed, Recurrent, Residual, layer

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BUDGET = 64 * MIB
WIDTH, LENGTH, BATCH = 256, 512, 16
STEPS = 3


@pytest.fixture(autouse=True)
def device(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):  # if it may only warn, torch takes attention that is not deterministic
        yield torch.device("cuda")
    torch.use_deterministic_algorithms(False)


def sequences(device) -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3)).to(device)


def pictures(device) -> torch.Tensor:
    return torch.randn(32, 16, 64, 64, generator=torch.Generator().manual_seed(3)).to(device)


MODELS = {
    "transformer": (lambda: nn.Sequential(*(layer() for _ in range(8))), sequences),
    "transformer with sparse activations": (lambda: nn.Sequential(*(layer("relu") for _ in range(8))), sequences),
    "checkpointed transformer": (lambda: Checkpointed(reentrant=False, make=layer, count=8), sequences),
    "LSTM": (Recurrent, sequences),
    "ResNet": (lambda: nn.Sequential(*(Residual(16) for _ in range(6))), pictures),
}


def gradients(model, around, batch, seed=0) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with around():
        loss = model(batch.clone()).square().mean()
    loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]


def same(mine, theirs) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def peak_of(run) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def plain_and_offloaded(make, inputs, offload, device, dtype=torch.float32):
    """One step without and one with offloading, each to be called with a seed."""
    torch.manual_seed(7)
    model = make().to(device)
    other = copy.deepcopy(model)  # BatchNorm's buffers change with each step
    batch = inputs(device)
    cast = (lambda: torch.autocast("cuda", dtype)) if dtype != torch.float32 else nullcontext

    def step(which, around):
        def run(seed: int) -> list[torch.Tensor]:
            with cast():
                return gradients(which, around, batch, seed)

        return run

    return step(model, nullcontext), step(other, lambda: offload)


# --- gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_on_a_gpu_are_bitwise_those_without_offloading(device, tmp_path, name, dtype):
    make, inputs = MODELS[name]
    offload = ActivationOffload(tmp_path, budget="16MiB")
    plain, offloaded = plain_and_offloaded(make, inputs, offload, device, dtype)
    for seed in range(STEPS):
        assert same(offloaded(seed), plain(seed)), seed
    report = offload.report()
    assert report.written > 16 * MIB and report.gpu_way and not report.failure, report
    assert report.wrote.planned is not None, "later steps had a plan"
    largest = max(size for known in offload._offloader._known._steps for size in known.sizes)
    assert report.peak <= parsed("16MiB") + largest, report


def test_a_step_on_a_gpu_takes_less_memory(device, tmp_path):
    offload = ActivationOffload(tmp_path, budget=BUDGET)
    plain, offloaded = plain_and_offloaded(*MODELS["transformer"], offload, device)
    for seed in range(STEPS):
        assert same(offloaded(seed), plain(seed))
    assert peak_of(lambda: offloaded(0)) < 0.6 * peak_of(lambda: plain(0))


# --- streams


def deep(value: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        value = (value * 1.01).exp().tanh()
    return value.sum()


def test_a_forward_on_a_stream_of_its_own_is_written_after_it_was_computed(device, tmp_path):
    offload = ActivationOffload(tmp_path, budget=4 * MIB)
    leaf = torch.randn(2048, 2048, device=device, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # what is saved is computed long after it was packed
        with offload:
            loss = deep(leaf)
        loss.backward()
    stream.synchronize()
    assert torch.equal(leaf.grad, torch.autograd.grad(deep(leaf), leaf)[0])


def test_memory_that_another_stream_still_reads_is_not_given_away_when_it_was_written(device, tmp_path):
    """Allocated in one stream, and saved by a slow operation of another: the first would take the memory again."""
    offload = ActivationOffload(tmp_path, budget="16MiB")
    leaf = torch.randn(2048, 2048, device=device, requires_grad=True)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with offload:
        value = leaf * 1.5
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            squares = value.square()  # packed now, read later
            torch.cuda._sleep(400_000_000)
            again = value * 1.0  # read after it was written to the file
        want = leaf.detach() * 1.5
        settled(offload)
        del value
        spoiled = [torch.full((2048, 2048), float("nan"), device=device) for _ in range(8)]
    main.wait_stream(side)
    assert torch.equal(again, want) and torch.equal(squares, want.square())
    del spoiled


# --- memory that is short, captured graphs, and the way to the disk


def test_what_a_captured_graph_saves_stays_and_a_warning_says_so(device, tmp_path, caplog):
    offload = ActivationOffload(tmp_path, budget=BUDGET)
    leaf = torch.randn(1024, 1024, device=device, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        deep(leaf).backward()
    torch.cuda.current_stream().wait_stream(stream)
    want = leaf.grad.clone()
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    forward_hooks._tell_of_graphs.cache_clear()
    with caplog.at_level(logging.WARNING, "fastckpt"), torch.cuda.graph(graph):
        with offload:
            loss = deep(leaf)
        loss.backward()
    assert [record.getMessage() for record in caplog.records if "captured CUDA graph" in record.getMessage()]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(leaf.grad, want)
    report = offload.report()
    assert report.written == 0 and not report.failure


@pytest.mark.parametrize("size", [4096, MIB, 3 * MIB + 17, 8 * MIB + 4096, 40 * MIB + 1])
@pytest.mark.parametrize("direct", [False, True])
def test_bytes_on_a_gpu_come_back_as_they_were_written(device, tmp_path, size, direct):
    file = ScratchFile(tmp_path)
    transfers = Transfers(file)
    if not direct:
        transfers.gpudirect.refusal = "not wanted in this test"
    part = torch.randint(0, 256, (size + 512,), dtype=torch.uint8, device=device)[512:]
    region = file.take(transfers.room(size, 1))
    written = transfers.write([part], region)
    if direct and transfers.gpudirect.cufile is None:
        pytest.skip(f"no GPUDirect Storage: {transfers.gpudirect.way}")
    assert torch.equal(transfers.fetch(written, part.device)[0], part)
    # Each way reads what the other one has written: the tail of a part goes through the host.
    (transfers.gpudirect.cufile, before) = (None, transfers.gpudirect.cufile)
    assert torch.equal(transfers.fetch(written, part.device)[0], part)
    transfers.gpudirect.cufile = before
