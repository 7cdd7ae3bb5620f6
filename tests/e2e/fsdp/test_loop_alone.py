"""`fastckpt.Checkpointer` with sharded models in a job of one rank."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from fastckpt import Checkpointer
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import ConfigError, NoLoadableCheckpoint, NotLoadable
from fastckpt.fsdp import FsdpShardCheckpointer, StorageType
from tests.e2e.dcp.states import same
from tests.e2e.ddp.conftest import directory as directory


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # FSDP1 has cycles: gloo ends a process whose groups end late
    dist.destroy_process_group()


class Scaled(nn.Linear):
    """Its extra state grows with the first steps, as that of Transformer Engine's modules does; it may be a tensor."""

    kind: Any = torch.tensor
    peaks: tuple[float, ...] = ()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.peaks = (*self.peaks, inputs.detach().abs().max().item())[-4:]
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return self.kind(self.peaks)

    def set_extra_state(self, state: Any) -> None:
        self.peaks = tuple(float(each) for each in state)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = Scaled(5, 8), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu())


class Value:
    """Its state may be what DCP would not give back as it was."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[Any, Any]:
        return {"value": self.value, 7: {}}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[7] == {}
        self.value = state["value"]


class Training:
    """Two optimizers, of which one makes its first step late."""

    def __init__(self, directory: Path, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model, self.average = fully_shard(Net()), fully_shard(nn.Linear(5, 8))
        used, late = [*self.model.first.parameters(), *self.model.idle.parameters()], self.model.second.parameters()
        self.optimizers = [torch.optim.AdamW(used, 0.1), torch.optim.AdamW(late, 0.1)]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [2, 5])
        self.value = Value()
        parts = {"model": self.model, "optimizer": self.optimizers, "scheduler": self.scheduler}
        others = {"average": self.average, "value": self.value}
        self.checkpointer = Checkpointer(directory, **parts | {"every": 1, "others": others} | options)

    def steps(self, first: int, last: int, updates: int) -> None:
        for step in range(first, last + 1):
            self.model(torch.ones(2, 5) * step).square().sum().backward()
            if step % updates == 0:
                for optimizer in self.optimizers[: 1 if step < 4 else 2]:
                    optimizer.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                self.scheduler.step()
            with torch.no_grad():
                self.average.weight.lerp_(self.model.first.weight, 0.1)
                self.model(torch.ones(2, 5))  # after a forward FSDP2 has whole parameters, without gradients
            self.value.value = {step: [step, {}, (1.5, "x" * 9 * step)]}
            self.checkpointer.step(step)

    @classmethod
    def of(cls, directory: Path, last: int, updates: int = 1, **options: Any) -> "Training":
        """One that began afresh, and has ended after some steps."""
        training = cls(directory, **options)
        with training.checkpointer as checkpointer:
            assert checkpointer.resume() == 0
            training.steps(1, last, updates)
        return training

    @property
    def state(self) -> Any:
        modules = [each.state_dict() for each in (self.model, self.average)]
        optimizers = [each.state_dict() for each in self.optimizers]
        return _whole([*modules, *optimizers, self.scheduler.state_dict(), self.value.value])


def _whole(node: Any) -> Any:
    if isinstance(node, DTensor):
        return node.full_tensor().detach().clone()
    if isinstance(node, dict):
        return {name: _whole(child) for name, child in node.items()}
    if isinstance(node, list | tuple):
        return dict(enumerate(map(_whole, node)))
    return node.clone() if isinstance(node, torch.Tensor) else node


@pytest.mark.parametrize(("updates", "kind"), [(1, torch.tensor), (2, list)])
def test_a_sharded_loop_resumes_bit_for_bit(directory: Path, monkeypatch: pytest.MonkeyPatch, updates: int, kind: Any):
    """With gradients that add up, a sharded average, an extra state of either kind, and all kinds of keys."""
    monkeypatch.setattr(Scaled, "kind", staticmethod(kind))
    options = {"gradients": updates > 1}
    whole = Training.of(directory / "whole", 6, updates, every=1000)
    for last in range(1, 7):
        part = Training(directory / "parts", seed=last if last > 1 else 0, **options)
        with part.checkpointer as checkpointer:
            assert checkpointer.resume() == last - 1
            if last > 2:
                assert part.value.value == {last - 1: [last - 1, {}, (1.5, "x" * 9 * (last - 1))]}
            assert [len(each.state) for each in part.optimizers] == _with_state(last - 1, updates)
            part.steps(last, last, updates)
    assert same(part.state, whole.state)
    assert part.model.first.peaks == whole.model.first.peaks == (5.0, 1.0, 6.0, 1.0)


def _with_state(step: int, updates: int) -> list[int]:
    """How many parameters of each optimizer have one: not those that are not used, nor before the first step."""
    return [2 if step >= updates else 0, 2 if step // updates * updates >= 4 else 0]


def save(checkpointer: Checkpointer) -> None:
    with checkpointer:
        assert checkpointer.resume() == 0
        assert checkpointer.step(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    model.zero_grad()


def test_parameters_frozen_at_resume_keep_their_optimizer_states(directory: Path):
    training = Training.of(directory, 2)
    other = Training(directory, seed=3)
    other.model.first.requires_grad_(False)
    with other.checkpointer as checkpointer:
        assert checkpointer.resume() == 2
    assert same(other.state, training.state)
    assert not any(parameter.requires_grad for parameter in other.model.first.parameters())


def test_a_model_that_was_used_before_resumes(directory: Path):
    model, average = fully_shard(Net()), fully_shard(Net())
    parts = {"optimizer": torch.optim.AdamW(model.parameters()), "others": {"average": average}}
    with torch.no_grad():
        model(torch.ones(2, 5)), average(torch.ones(2, 5))
    save(Checkpointer(directory, model=model, every=1, **parts))
    assert (directory / "checkpoint-1" / "__0_0.distcp").exists()


class Slow(torch.optim.SGD):
    """Has a number at first, and from the third step on a list, and tensors in float32, whatever the weights are in."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 2:
                    state.setdefault("slow", torch.zeros_like(parameter, dtype=torch.float)).add_(
                        parameter.grad.float()
                    )
                    state["past"] = [*state.get("past", [])[-1:], state["count"]]
                    parameter.sub_(state["slow"].to(parameter.dtype), alpha=0.01)


class Closureless(torch.optim.AdamW):
    """Its step takes nothing, as of many scripts' own optimizers."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


class Wrapper(torch.optim.Optimizer):
    """Never called ``super().__init__()``, as those of trainers of others."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        for number, each in enumerate(optimizers):
            setattr(self, f"optimizer{number}", each)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer0.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer0.state_dict()

    @classmethod
    def of_adam(cls, parameters: Any, lr: float) -> "Wrapper":
        return cls(torch.optim.AdamW(parameters, lr))


@pytest.mark.parametrize(
    ("kind", "sharded", "scheduled"),
    [
        (Closureless, False, False),
        (Slow, True, True),
        (Wrapper.of_adam, True, False),
    ],
)
def test_each_kind_of_optimizer_resumes_with_its_state(directory: Path, kind: Any, sharded: bool, scheduled: bool):
    """Also one whose step takes no closure, states made after the first step, or in another dtype than the weights'."""

    def steps(place: Path, last: int) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(5, 4, dtype=torch.bfloat16)
        model = fully_shard(model) if sharded else model
        optimizer = kind(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if scheduled else ()
        parts: Any = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "every": 1}
        with Checkpointer(place, **parts) as checkpointer:
            for step in range(checkpointer.resume() + 1, last + 1):
                train(model, optimizer, torch.ones(2, 5, dtype=torch.bfloat16) / step)
                if scheduled:
                    scheduler.step()
                checkpointer.step(step)
        return _whole([model.state_dict(), optimizer.state_dict()])

    steps(directory / "parts", 3)
    assert same(steps(directory / "parts", 5), steps(directory / "whole", 5))


def test_a_load_that_fails_leaves_the_optimizer_as_it_was(directory: Path):
    def build(width: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            train(model, optimizer, torch.ones(2, 8))
        return model, optimizer

    with FsdpShardCheckpointer(str(directory)) as checkpointer:
        model, optimizer = build(8, 2)
        checkpointer.save_checkpoint(2, model, optimizer, storage_type=StorageType.MEMORY)
        for steps in (3, 0):
            model, optimizer = build(16, steps)
            before = _whole(optimizer.state_dict())
            with pytest.raises(BaseException, match=r"[Ss]ize"):
                checkpointer.load_checkpoint(model, optimizer)
            assert same(_whole(optimizer.state_dict()), before)
            assert len(optimizer.state) == 4 * bool(steps)


def test_optimizers_of_other_parameters_are_refused(directory: Path):
    def training(*groups: list[str]) -> Checkpointer:
        model = fully_shard(Net())
        layers = [[model.get_submodule(name) for name in group] for group in groups]
        given = [{"params": [each for layer in group for each in layer.parameters()]} for group in layers]
        return Checkpointer(directory, model=model, optimizer=torch.optim.AdamW(given), every=1)

    save(training(["first"], ["second"]))
    for says, groups in {
        "with 2 parameter groups, and has 1": [["first", "second"]],
        "with 2 parameter groups, and has 3": [["first"], ["second"], ["idle"]],
        "other parameters in a group of its AdamW: see idle.bias, idle.weight.": [["first"], ["second", "idle"]],
        "see first.bias, first.weight, second.bias, second.weight.": [["second"], ["first"]],
    }.items():
        with training(*groups) as checkpointer:
            with pytest.raises(ConfigError, match=says):
                checkpointer.resume()
            assert "groups, and" not in says or not checkpointer._frequency._optimizers[0].state, "nothing is changed"


@pytest.mark.parametrize("sharded", [True, False])
def test_a_new_option_of_an_optimizer_is_kept_and_another_model_is_refused_by_name(directory: Path, sharded: bool):
    """A relaunch after an upgrade of torch, whose optimizer has one more option; and one with another model."""

    def begun(step: int, *names: str, newer: bool = False, layers: int = 1, size: int = 3) -> torch.optim.Optimizer:
        model = nn.Sequential(nn.Linear(5, size), *(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = torch.optim.AdamW((fully_shard(model) if sharded else model).parameters(), 0.1 * (1 + newer))
        if newer:
            optimizer.param_groups[0]["newer"] = 7
        with Checkpointer(directory, model=model, optimizer=optimizer, every=1) as checkpointer:
            assert checkpointer.resume(from_script=names) == step
            if step == 0:
                train(model, optimizer, torch.ones(2, 5))
                checkpointer.step(1)
        return optimizer

    begun(0)
    (group,) = begun(1, newer=True).param_groups
    assert group["newer"] == 7 and group["lr"] == 0.1
    (group,) = begun(1, "lr", newer=True).param_groups
    assert group["lr"] == 0.2, "the script's"
    lacks = "has no model.2.bias, model.2.weight" if sharded else "groups of 4 parameters, .* with 2.bias, 2.weight"
    with pytest.raises(ConfigError, match=rf"{lacks}.*another checkpoint directory"):
        begun(1, layers=2)
    with pytest.raises(ConfigError, match=r"(?i)size mismatch.*another checkpoint directory" if sharded else "size"):
        begun(1, size=4)


def test_a_sharded_model_that_cannot_be_saved_is_refused_at_once(directory: Path):
    model = fully_shard(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    flat = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    for says, parts in {
        "AdamW has parameters that are not of the sharded": {"model": fully_shard(Net()), "optimizer": optimizer},
        "optimizer is a Value; with a sharded model": {"model": model, "optimizer": Value()},
        "gradients=True: those of FSDP1": {"model": flat, "gradients": True},
        "LBFGS makes no step without a closure": {"model": model, "optimizer": torch.optim.LBFGS(model.parameters())},
        "scaler is an object": {"model": model, "others": {"scaler": object()}},
        "has 2 optimizers as attributes.*give the torch opt": {
            "model": model,
            "optimizer": Wrapper(optimizer, optimizer),
        },
    }.items():
        with pytest.raises(ConfigError, match=says):
            Checkpointer(directory, **parts)
    with pytest.raises(ConfigError, match="super"):
        DdpCheckpointer(directory, overlap=Wrapper())
    assert not directory.exists() or not any(directory.iterdir())
    with Checkpointer(directory, model=model, others={"another": optimizer}, every=1) as checkpointer:
        checkpointer.resume()
        train(model, optimizer, torch.ones(2, 5))
        with pytest.raises(ConfigError, match="another has a state of shards"):
            checkpointer.step(1)
        checkpointer._step = 0  # there is nothing to save
    with Checkpointer(directory, model=model, gradients=True, every=1) as checkpointer:
        step = checkpointer.resume()
        model.set_requires_gradient_sync(False)
        with pytest.raises(ConfigError, match="keeps gradients where they cannot be saved"):
            checkpointer.step(step + 1)
        checkpointer._step = step


def test_a_sharded_loop_refuses_checkpoints_of_another_kind(directory: Path):
    plain, sharded = nn.Linear(5, 3), fully_shard(nn.Linear(5, 3))
    for first, then, says in ((plain, sharded, "full_state_dict=True"), (sharded, plain, "dcp_to_torch")):
        place = directory / type(first).__name__
        save(Checkpointer(place, model=first, every=1))
        with Checkpointer(place, model=then) as checkpointer, pytest.raises(NoLoadableCheckpoint, match=says):
            checkpointer.resume()
    says = r"\['average'\]\['weight'\] is a torch.distributed.tensor.DTensor"
    with Checkpointer(directory / "both", model=plain, others={"average": sharded}) as checkpointer:
        for _ in range(2):
            with pytest.raises(NotLoadable, match=says):
                checkpointer.resume()


def test_a_manual_checkpointer_loads_checkpoints_of_a_sharded_loop(directory: Path):
    training = Training.of(directory, 5)
    other = Training(directory, seed=3)
    other.checkpointer.close()
    with FsdpShardCheckpointer(directory) as manual:
        extra = manual.load_checkpoint(other.model)
        assert torch.equal(other.model.first.weight.full_tensor(), training.model.first.weight.full_tensor())
        assert extra["scheduler"] == training.scheduler.state_dict() and extra["value"][7] == {}
        extra |= {"average": training.average.state_dict(), "more": 5}
        state = {"model": training.model, "optimizer": training.optimizers, "extra_sd": extra}
        assert manual.save_checkpoint(6, storage_type=StorageType.DISK, **state)
    other = Training(directory, seed=3, scheduler=(), others={"average": (average := fully_shard(nn.Linear(5, 8)))})
    with other.checkpointer as checkpointer:
        assert checkpointer.resume() == 6
    assert torch.equal(average.weight.full_tensor(), training.average.weight.full_tensor())
    assert same(_whole(other.optimizers[1].state_dict()), _whole(training.optimizers[1].state_dict()))


def test_gradients_are_loaded_in_the_same_sharding_only(directory: Path, monkeypatch: pytest.MonkeyPatch):
    Training.of(directory, 1, updates=2, gradients=True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    other = Training(directory, gradients=True)
    other.checkpointer._parts._gradients._model = nn.ModuleDict({"first": nn.Linear(2, 8), "second": nn.Linear(8, 3)})
    with other.checkpointer as checkpointer, pytest.raises(ConfigError, match="in the same sharding only"):
        checkpointer.resume()
