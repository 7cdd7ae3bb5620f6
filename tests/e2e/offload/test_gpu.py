"""The same on a GPU: bitwise gradients, less memory, streams respected, by either way to the disk.

None of these has run yet: no GPU was there. Tests with GPUDirect Storage skip where fastckpt says that there is none.
"""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastckpt._core.offload import forward_hooks
from fastckpt._core.offload.scratch_file import ScratchFile
from fastckpt._core.offload.transfers import Transfers
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.losses import settled, some_loss
from tests.e2e.offload.models import CASES, floats, layer
from tests.e2e.offload.test_models import assert_bitwise_within_budget

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """New tensors are there, also those of models."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # If it may only warn, torch takes attention that is not deterministic.
    with torch.device("cuda") as made, sdpa_kernel(SDPBackend.MATH):
        yield made
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", sorted({*CASES} - {"fully_shard", "compiled"}))
def test_gradients_on_a_gpu_are_bitwise_those_without_offloading(tmp_path, name):
    offload = ActivationOffload(tmp_path, budget=CASES[name].budget)
    assert_bitwise_within_budget(name, offload)
    assert offload.report().gpu_way


def test_a_step_on_a_gpu_takes_less_memory(tmp_path):
    model, batch = nn.Sequential(*(layer() for _ in range(8))), floats(16, 512, 256)
    offload, peaks = ActivationOffload(tmp_path, budget=64 * MIB), []
    for around in (offload, nullcontext()):
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with around:
                loss = model(batch).square().mean()
            loss.backward()
            torch.cuda.synchronize()
            model.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < 0.6 * peaks[1], peaks


# --- streams


def test_a_forward_on_a_stream_of_its_own_is_written_after_it_was_computed(device, tmp_path):
    offload = ActivationOffload(tmp_path, budget=4 * MIB)
    leaf = torch.randn(2048, 2048, device=device, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # what is saved is computed long after it was packed
        with offload:
            loss = some_loss(leaf, 6)
        loss.backward()
    stream.synchronize()
    assert torch.equal(leaf.grad, torch.autograd.grad(some_loss(leaf, 6), leaf)[0])


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
    offload = ActivationOffload(tmp_path, budget=64 * MIB)
    leaf = torch.randn(1024, 1024, device=device, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        some_loss(leaf, 6).backward()
    torch.cuda.current_stream().wait_stream(stream)
    want = leaf.grad.clone()
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    forward_hooks._tell_of_graphs.cache_clear()
    with caplog.at_level(logging.WARNING, "fastckpt"), torch.cuda.graph(graph):
        with offload:
            loss = some_loss(leaf, 6)
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
