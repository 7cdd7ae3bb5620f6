"""Data sets, and jobs whose ranks are loaders in one process: they commit, are killed, and come back unlike before."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastckpt.data import ResumableDataLoader, data_state, load_data_state


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


@dataclass
class Job:
    """A job of some ranks; ``committed`` has for each step (epoch, samples by rank), as of the last commit.

    Attributes:
        dataset: Of all ranks.
        common: Arguments of all loaders.
        committed: The steps whose state was saved.
        since: The steps after that.
    """

    dataset: Any
    common: dict[str, Any]
    committed: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    since: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)

    def start(self, world: int, **own: Any) -> None:
        """Start that many ranks where the last commit was."""
        self.since, self.iterators = [], []
        self.loaders = [
            ResumableDataLoader(self.dataset, num_replicas=world, rank=rank, **self.common, **own)
            for rank in range(world)
        ]
        if self.saved:
            for rank, loader in enumerate(self.loaders):
                load_data_state(loader, self.saved[0].common, self.saved[rank].own if rank < len(self.saved) else None)
        self._begin()

    def step(self) -> bool:
        """Take a step on all ranks; False if it came to the end of the epoch, and the next one begins."""
        epoch = self.loaders[0].epoch
        batches = [next(iterator, None) for iterator in self.iterators]
        if any(batch is not None for batch in batches):
            self.since.append((epoch, [[] if batch is None else indices(batch) for batch in batches]))
        if all(batch is None for batch in batches):
            self._begin()
            return False
        return True

    def commit(self) -> None:
        """Save, if all ranks took the step; all must say the same."""
        if len({loader.epoch for loader in self.loaders}) > 1:
            return  # an uneven end: ranks without a batch in the last step are through already
        self.saved = [data_state(loader) for loader in self.loaders]
        assert all(state.common == self.saved[0].common for state in self.saved)
        self.committed += self.since
        self.since = []

    def epochs(self) -> dict[int, list[list[list[int]]]]:
        """The committed steps by epoch."""
        epochs: dict[int, list[list[list[int]]]] = {}
        for epoch, batches in self.committed:
            epochs.setdefault(epoch, []).append(batches)
        return epochs

    def _begin(self) -> None:
        self.iterators = [iter(loader) for loader in self.loaders]


def in_order(batches: list[list[int]]) -> list[int]:
    """The samples of a step as the epoch has them: the ranks take turns."""
    longest = max(len(batch) for batch in batches)
    return [batch[row] for row in range(longest) for batch in batches if row < len(batch)]
