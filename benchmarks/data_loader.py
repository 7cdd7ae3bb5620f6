"""Measures ResumableDataLoader beside torch's DataLoader: processor time per sample, both in turn in one run.

python benchmarks/data_loader.py [--rounds 7]
"""

import argparse
import random
import resource
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fastckpt.data import ResumableDataLoader

SAMPLES, BATCH = 20_000, 64


class Rows(Dataset[Any]):
    """Rows of a tensor, by a user's own class."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Noise(Rows):
    """Draws from torch's generator."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + torch.randn(32)


class Flips(Rows):
    """Draws from Python's generator."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] if random.random() < 0.5 else -self.rows[index]


class Scales(Rows):
    """Draws from numpy's generator."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] * float(np.random.rand())


class Images(Rows):
    """Images that take as much work as a small picture."""

    def __getitem__(self, index: int) -> Any:
        image = torch.nn.functional.interpolate(torch.randn(1, 3, 32, 32), size=(64, 64), mode="bilinear")
        return image.flip(-1) if random.random() < 0.5 else image


DATASETS: dict[str, Callable[[], Any]] = {
    "20,000 integers": lambda: list(range(SAMPLES)),
    "TensorDataset, 32 floats": lambda: TensorDataset(torch.randn(SAMPLES, 32)),
    "a class of one's own, 32 floats, draws nothing": Rows,
    "the same, torch.randn": Noise,
    "the same, random.random": Flips,
    "the same, numpy.random.rand": Scales,
    "a picture of 64 x 64, resized and flipped": Images,
}


def processor_time() -> float:
    """Seconds that this process and its ended children have computed."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def cost(loader: Iterable[Any], samples: int) -> float:
    """Microseconds per sample."""
    before = processor_time()
    for _ in loader:
        pass
    return (processor_time() - before) / samples * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{'us per sample, median of ' + str(rounds):50} workers  DataLoader  ours   ratio")
    for name, make in DATASETS.items():
        dataset = make()
        for workers in (0, 2):
            times: dict[Any, list[float]] = {DataLoader: [], ResumableDataLoader: []}
            for _ in range(rounds):
                for kind, each in times.items():
                    each.append(cost(kind(dataset, BATCH, shuffle=True, num_workers=workers), SAMPLES))
            stock, ours = map(statistics.median, times.values())
            print(f"{name:50} {workers:7} {stock:11.2f} {ours:5.2f} {ours / stock:7.2f}", flush=True)


if __name__ == "__main__":
    main()
