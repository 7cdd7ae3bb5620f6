"""When a worker arrives at collectives, and waits in them: models of DDP and fully_shard in a group of one.

Each part of a step sleeps, and waits are those for a future of a communication hook: bounds are from below only, as
sleeps are, so a part that gets another's time leaves that below its bound.
"""

import contextlib
import copy
import io
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fastckpt._core.client import arrival_hooks
from fastckpt._core.client.heartbeat import Heartbeat
from fastckpt._core.memory.step_clock import AWAY, BETWEEN, WAIT, running
from fastckpt._core.memory.telemetry import PARTS, TelemetryBlock, telemetry_name, unlink

NAP = {"data": 0.004, "forward": 0.008, "backward": 0.012, "rest": 0.016, "wait": 0.02}
"""Seconds that each part takes."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def block(tmp_path) -> Iterator[TelemetryBlock]:
    block = TelemetryBlock(telemetry_name(tmp_path), 1)
    yield block
    block.close()
    unlink(block.name)


@pytest.fixture
def beats(block: TelemetryBlock) -> Iterator[Heartbeat]:
    beats = Heartbeat(block.line(0), 0, 0, parts=True)
    yield beats
    with contextlib.suppress(ValueError):
        beats.close()


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP["backward"])
        return gradient


@dataclass(slots=True)
class Slots:
    loss: None
    b: torch.Tensor


class Model(torch.nn.Module):
    """Two layers, with the naps of a forward and a backward between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
        self.spare = torch.nn.Linear(4, 4) if kind == "various" else torch.nn.Identity()
        if kind == "various":
            self.norm = torch.nn.BatchNorm1d(4)

    def middle(self, given: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP["forward"])
        return SlowBackward.apply(self.layers[0](given))

    def forward(self, given: torch.Tensor) -> Any:
        if self.kind == "checkpointed-within":
            found = checkpoint(self.middle, given, use_reentrant=True)
        else:
            found = self.middle(given)
        if self.kind != "various":
            return self.layers[1](found)
        return {"a": None, "b": [Slots(None, self.layers[1](self.norm(found)))]}


def late(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, whose reduction ends so long after the rank has arrived at it."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    clock, end = running.clock, time.monotonic() + 10.0

    def reduce() -> None:
        while clock is not None and clock.in_backward and clock.part != WAIT and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(NAP["wait"])
        future.set_result(bucket.buffer())

    threading.Thread(target=reduce).start()
    return future


def train(model: torch.nn.Module, kind: str, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        time.sleep(NAP["data"])
        given = torch.randn(8, 4, requires_grad=kind == "checkpointed-within")
        for last in (False, True) if kind == "accumulated" else (True,):
            with contextlib.nullcontext() if last else model.no_sync():
                found = model(given)
                found = found["b"][0].b if kind == "various" else found
                found.square().mean().backward()
        time.sleep(NAP["rest"])
        optimizer.step()
        optimizer.zero_grad()


def spent(block: TelemetryBlock) -> dict[str, float]:
    return dict(zip(PARTS, (part / 1e9 for part in block.read(0).parts), strict=True))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def made(inner: torch.nn.Module | None = None) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(inner or torch.nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def hooks_of(model: torch.nn.Module) -> int:
    there = [model, *model.modules()]
    of_modules = sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in there)
    return of_modules + sum(len(each._post_accumulate_grad_hooks or ()) for each in model.parameters())


@pytest.mark.parametrize("kind", ["accumulated", "various", "checkpointed-within", "sharded"])
def test_the_parts_of_a_step_are_those_that_took_the_time(block: TelemetryBlock, beats: Heartbeat, kind: str):
    """Of DDP, also of a model with much besides; or of fully_shard, whose waits for one rank are seen."""
    model: Any = Model(kind)
    if kind == "sharded":
        for each in (model.layers[1], model):
            fully_shard(each)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=kind == "various")
        model.register_comm_hook(None, late)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, kind, optimizer, steps=1)  # models are found at the end of the first step
    before = spent(block)
    train(model, kind, optimizer, steps=2)
    took = {part: seconds - before[part] for part, seconds in spent(block).items()}
    # A wait is shorter by what a busy machine needs from the launch of the reduction to the arrival.
    for part, nap in (NAP | {"wait": 1e-9 if kind == "sharded" else NAP["wait"] / 2}).items():
        if part == "forward" and kind == "checkpointed-within":
            assert took["backward"] >= 2 * (NAP["backward"] + nap), "activations are computed again in the backward"
        assert took[part] >= 2 * nap * (2 if kind == "accumulated" and part in ("forward", "backward") else 1), part


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_trained_model_is_scripted_exported_and_saved_as_without_hooks_which_end_with_the_watch(beats: Heartbeat):
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))  # whose buffers are broadcast
    model, optimizer = made(plain)
    step(model, optimizer)
    step(model, optimizer)
    assert running.clock is not None and hooks_of(model)
    assert not plain._forward_pre_hooks
    torch.jit.script(plain)
    torch.export.export(plain, (torch.randn(2, 4),), strict=True)
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        other(torch.randn(2, 4)).sum().backward()
    for whole in (plain, model, copy.deepcopy(plain)):
        file = io.BytesIO()
        torch.save(whole, file)
        assert b"fastckpt" not in file.getvalue(), "who loads it need not have this library"
    copied = pickle.loads(pickle.dumps(arrival_hooks._begin_forward))
    assert copied(plain, ()) is None and copied(plain, (), torch.ones(1)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(found := model(torch.randn(2, 4)), io.BytesIO())
    beats.close()
    assert not hooks_of(model) and running.clock is None
    found.sum().backward()  # whose hooks are on its tensors
    step(model, optimizer)


def fail(*_: Any) -> None:
    raise RuntimeError("as of another release of torch")


def test_a_failure_of_a_hook_ends_the_watch_and_not_the_step(
    beats: Heartbeat, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert running.clock is not None and running.clock.part == AWAY
    model, optimizer = made()
    step(model, optimizer)
    assert beats._arrivals
    monkeypatch.setattr(arrival_hooks, "when_backward_ends", fail)
    for _ in range(2):
        step(model, optimizer)
    assert running.clock is None
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == "slow ranks are not detected any more: as of another release of torch"


def interrupted_backward(model: torch.nn.Module) -> None:
    found = model(torch.randn(2, 4))
    found.register_hook(fail)
    with pytest.raises(RuntimeError):
        found.sum().backward()


def sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = fully_shard(torch.nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_follows_a_backward_that_failed_and_a_forward_without_one(beats: Heartbeat):
    for strange in (lambda model: model(torch.randn(2, 4)), interrupted_backward):
        model, optimizer = sharded()
        step(model, optimizer)
        strange(model)
    model, optimizer = sharded()  # hooks of the former do not come back from a backward that failed
    for _ in range(2):
        step(model, optimizer)
    assert running.clock is not None and running.clock.part == BETWEEN and not running.clock.in_backward


def test_a_failed_installation_of_hooks_leaves_none(beats: Heartbeat, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrival_hooks, "_is_sharded", fail)
    model, optimizer = made()
    step(model, optimizer)
    assert not beats._arrivals and not hooks_of(model)
