"""Training whose saves overlap with it: each copy is held until something waits for it, as if it were slow."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core import metrics
from fastckpt._core.memory import slots
from fastckpt._core.snapshot import mutation_check
from fastckpt.ddp import DdpCheckpointer, SaveResult, StorageType
from tests.e2e.ddp.conftest import Ranks
from tests.unit._core.format.baking import assert_same, reference

DEADLINE = 60.0


class Held:
    """Holds each copy until training waits for it, and then does what is to happen ``on`` a phase."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.holds = True
        self.on: dict[str, Callable[[], object]] = {}
        self._waits = threading.Event()

    def see(self, phase: str, fields: dict[str, Any]) -> None:
        if phase == "overlap.copy":
            assert not self.holds or self._waits.wait(DEADLINE), "nothing waits for the copy"
            self._waits.clear()
        if phase.startswith("overlap."):
            self.said.append((phase, fields["step"]))
        if phase == "overlap.wait":
            self._waits.set()  # only once it is noted: the copy goes on at once, and is noted next
        self.on.get(phase, int)()

    def __enter__(self) -> "Held":
        metrics.observe(self.see)
        return self

    def __exit__(self, *_: object) -> None:
        metrics.unobserve(self.see)


def newest(one: DdpCheckpointer) -> tuple[int, Path] | None:
    """Step and slot of the newest whole checkpoint in memory."""
    found = [(c.step, slot) for slot in one._writer.link.arena.glob("slot-*") if (c := slots.read(slot).committed)]
    return max(found, default=None)


def in_memory(one: DdpCheckpointer) -> tuple[int, Any]:
    """Step and model of the newest whole checkpoint in memory, read by torch itself."""
    found = newest(one)
    assert found is not None
    return found[0], torch.load(found[1] / "model.pt", weights_only=True)


def net(width: int = 6) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.GELU(), torch.nn.Linear(width, 2)
    )


def batch() -> torch.Tensor:
    return torch.randn(8, 4)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(mutation_check, "WORTH", 1)
    with Held() as held:
        yield held


class Training:
    """A model, and a checkpointer of the first of these ranks, whose saves overlap with the optimizer's steps."""

    def __init__(
        self, ranks: Ranks, make: Any = torch.optim.AdamW, model: Any = None, *, world: int = 1, overlaps: bool = True
    ) -> None:
        self.model = net() if model is None else model
        self.optimizer = make(self.model.parameters())
        self.one = ranks.start(world, overlap=self.optimizer if overlaps else None)[0]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def learn(self) -> None:
        self.optimizer.zero_grad()
        self.model(batch()).square().sum().backward()
        self.optimizer.step()

    def save(self, step: int, *args: Any, storage_type: StorageType = StorageType.MEMORY, **options: Any) -> SaveResult:
        return self.one.save_checkpoint(step, self.state(), *args, storage_type=storage_type, **options)

    def proven(self) -> "Training":
        proven(self.one, self.optimizer, self.state)
        return self


def proven(one: DdpCheckpointer, optimizer: torch.optim.Optimizer, state: Callable[[], Any]) -> None:
    """Make the first save, which is copied at once, and a step after which saves overlap."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not one.save_checkpoint(0, state(), storage_type=StorageType.MEMORY).pending
    optimizer.step()


def assert_right(
    one: DdpCheckpointer,
    iterate: Callable[[], object],
    state: Callable[[], Any],
) -> None:
    """Save after each iteration; when the next is over, memory holds what torch.save would have written then.

    Each iteration takes a step of an optimizer.
    """
    wanted: Any = None
    for step in range(1, 5):
        iterate()
        if step > 1:
            found, got = in_memory(one)
            assert found == step - 1
            assert_same(got, wanted)
        wanted = reference(state())
        result = one.save_checkpoint(step, state(), storage_type=StorageType.MEMORY)
        assert (result.saved, result.pending, result.trouble) == (True, step > 1, ""), result
    assert_same(one.load_checkpoint(), wanted)
    assert one.loaded_step == 4


def assert_lost(training: Training, said: Any, how: str, why: str) -> None:
    """Check that the save of step 1 was lost, of which a warning tells, and that the next one is made at once."""
    (warning,) = [record.message for record in said.records if "overlap with" in record.message]
    assert re.search(how, warning) and newest(training.one)[0] == 0
    wanted = reference(training.state())
    result = training.save(2)
    assert (result.saved, result.pending, result.skipped) == (True, False, 1) and why in result.trouble
    assert_same(in_memory(training.one), (2, wanted))
