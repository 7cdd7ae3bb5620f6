"""Processor time of ResumableDataLoader, beside torch's DataLoader."""

import random
import resource
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Values
from benchmarks.harness.turn import Turn

SAMPLES, BATCH, ROUNDS = 20_000, 64, 3


class Rows(Dataset[Any]):
    """Rows of a tensor, by a user's own class."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Flips(Rows):
    """Draws from Python's generator."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] if random.random() < 0.5 else -self.rows[index]


class Pictures(Rows):
    """Images that take as much work as a small picture."""

    def __getitem__(self, index: int) -> Any:
        image = torch.nn.functional.interpolate(torch.randn(1, 3, 32, 32), size=(64, 64), mode="bilinear")
        return image.flip(-1) if random.random() < 0.5 else image


DATASETS: dict[str, Callable[[], Any]] = {
    "integers": lambda: list(range(SAMPLES)),
    "32 floats": Rows,
    "32 floats, random": Flips,
    "resized pictures": Pictures,
}
WORKERS = (0, 2)


def cost(loader: Iterable[Any]) -> float:
    """Microseconds per sample of the processor, in this process and loader workers that have ended."""

    def used() -> float:
        found = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in found)

    before = used()
    for _ in loader:
        pass
    return (used() - before) / SAMPLES * 1e6


def measure(kind: str, turn: Turn) -> Values:
    """All data sets by one loader."""
    from fastckpt.data import ResumableDataLoader

    torch.set_num_threads(1)
    loader: Any = DataLoader if kind == STOCK else ResumableDataLoader
    return {
        f"{name}, {workers}": [
            cost(loader(dataset, BATCH, shuffle=True, num_workers=workers))
            for _ in range(1 if turn.is_quick else ROUNDS)
        ]
        for name, make in DATASETS.items()
        for dataset in [make()]
        for workers in WORKERS
    }


STOCK, OURS = "DataLoader", "ResumableDataLoader"
BENCHMARK = Benchmark(
    name="data_loader",
    question="What does ResumableDataLoader cost?",
    work="Processor time per sample, divided by that of torch's DataLoader.",
    contenders=[Contender(kind, partial(measure, kind)) for kind in (STOCK, OURS)],
    figures=[
        Figure(f"{name}, {workers} loader workers", f"{OURS}.{name}, {workers}", f"{STOCK}.{name}, {workers}")
        for name in DATASETS
        for workers in WORKERS
    ],
    gigabytes=0.0,
)
