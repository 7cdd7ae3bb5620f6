"""The mistakes that newcomers make, and the answer that each of them is to get: value, limit and remedy.

A mistake is a function of a `Scene`, with what it is to be answered with; its code is what a newcomer writes. What is
right after all, and is to work, stands among them.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset

from fastckpt import Checkpointer, DdpCheckpointer
from fastckpt.data import ResumableDataLoader

WARNING = "a warning, and the job goes on"
WORKS = "no answer: it works"


@dataclass
class Scene:
    """What a mistake is made with: a fresh directory, an environment, and what else was printed."""

    directory: str
    environment: pytest.MonkeyPatch
    mount: Callable[[int], Path]
    printed: list[str] = field(default_factory=list)

    def has(self, **variables: object) -> None:
        for name, value in variables.items():
            self.environment.setenv(name, str(value))


@dataclass(frozen=True)
class Mistake:
    """What a newcomer writes, and what the answer is to be.

    Attributes:
        make: Makes it.
        answer: The class of the exception, WARNING or WORKS.
        says: Of what was given, what is allowed, and what to do, between bars.
    """

    make: Callable[[Scene], object]
    answer: type[BaseException] | str
    says: str = ""


MISTAKES: dict[str, Mistake] = {}


def answered(*answer: Any) -> Callable[[Callable[[Scene], object]], Callable[[Scene], object]]:
    """Put a mistake into the table, with its answer and what that says."""

    def note(make: Callable[[Scene], object]) -> Callable[[Scene], object]:
        MISTAKES[make.__name__] = Mistake(make, *answer)
        return make

    return note


class Row:
    """What is given to a call, and the answer as above."""

    def __init__(self, given: Any, *answer: Any) -> None:
        self.given, self.answer = given, answer


def mistakes(make: Callable[[Scene, Any], object], **rows: Row) -> None:
    """Put mistakes of one call into the table."""
    for name, row in rows.items():
        MISTAKES[name] = Mistake(lambda scene, given=row.given: make(scene, given), *row.answer)


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((8,), float(index)), index % 2


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def parts(**others: Any) -> dict[str, Any]:
    """A model, its optimizer and its data; ``others`` take the place of some."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = ResumableDataLoader(Noise(), batch_size=8, shuffle=True)
    return {"model": model, "optimizer": optimizer, "data": loader} | others


def learn(given: dict[str, Any], batch: Any) -> None:
    given["optimizer"].zero_grad()
    torch.nn.functional.cross_entropy(given["model"](batch[0]), batch[1]).backward()
    given["optimizer"].step()


def train(
    directory: Any,
    number: Callable[[int], Any] = lambda step: step,
    *,
    steps: int = 3,
    resume: bool = True,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> Checkpointer:
    """The three lines; ``number`` is what the loop gives to step(), as a function of the true number."""
    given = parts(**others)
    checkpointer = Checkpointer(directory, **given, **(options or {}))
    try:
        step = checkpointer.resume() if resume else 0
        for batch in itertools.islice(given["data"], steps):
            learn(given, batch)
            step += 1
            checkpointer.step(number(step))
    finally:
        checkpointer.close()
    return checkpointer


def save(
    directory: Any,
    call: Callable[[DdpCheckpointer, int, dict[str, Any]], object] = lambda c, step, state: c.save_checkpoint(
        step, state
    ),
    *,
    steps: int = 3,
    load: bool = True,
    **options: Any,
) -> DdpCheckpointer:
    """A loop that saves each step by ``call``."""
    state = {"weights": torch.zeros(8), "layers": [torch.zeros(2)]}
    with DdpCheckpointer(directory, **options) as checkpointer:
        if load:
            checkpointer.load_checkpoint()
        first = checkpointer.loaded_step + 1
        for step in range(first, first + steps):
            call(checkpointer, step, dict(state))
    return checkpointer


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, which opens no sockets."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_by_zero(model: torch.nn.Module) -> Any:
    """An optimizer whose state is on several ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
