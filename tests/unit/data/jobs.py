"""Data sets of all kinds."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def drawn() -> list[float]:
    """What a random transform would draw from each generator."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


class Indexed(Dataset):
    """Samples with a random transform."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor(drawn(), dtype=torch.float64)


class Endless(IterableDataset):
    """A stream of samples with a random transform; it ends after ``length``."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index in range(self.length):
            yield index, torch.tensor(drawn(), dtype=torch.float64)


class OwnShards(IterableDataset):
    """Chooses what each rank and worker gets, as torch's documentation says; of unlike lengths."""

    def __init__(self, length: int, rank: int = 0, world: int = 1) -> None:
        self.length, self.rank, self.world = length, rank, world

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for index in range(self.length):
            shard = 0 if index < self.length // 3 else index % (self.world * workers)
            if shard == self.rank * workers + worker:
                yield index, torch.tensor(drawn(), dtype=torch.float64)


class Remembering(IterableDataset):
    """Has a state of its own; reading what was read before would be noticed."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.at["next"] < self.length:
            self.at["next"] += 1
            yield self.at["next"] - 1
        self.at["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.at

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = dict(state)


def indices(batch: Any) -> list[int]:
    """Which samples a batch of the data sets above has."""
    return (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()


def in_order(batches: list[list[int]]) -> list[int]:
    """The samples of a step as the epoch has them: the ranks take turns."""
    longest = max(len(batch) for batch in batches)
    return [batch[row] for row in range(longest) for batch in batches if row < len(batch)]
