"""Streams as others write them: with buffers, states, generators of their own, and shards."""

import io
import random
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import webdataset
from torch.utils.data import IterableDataset

from tests.unit.data.jobs import drawn

datasets.disable_progress_bars()


class Buffered(IterableDataset):
    """Shuffles with a buffer, by a generator that is made where it is opened.

    Args:
        seed: None for one of its own at each opening; "global" for Python's.
    """

    def __init__(self, length: int, seed: int | str | None = None, buffer: int = 10) -> None:
        self.length, self.seed, self.buffer, self.epoch = length, seed, buffer, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        seed = (self.seed + 1000 * self.epoch) if isinstance(self.seed, int) else None
        rng = random if self.seed == "global" else random.Random(seed)
        held: list[int] = []
        for index in range(self.length):
            held.append(index)
            if len(held) == self.buffer:
                yield self.sample(held.pop(rng.randrange(len(held))))
        while held:
            yield self.sample(held.pop(rng.randrange(len(held))))

    def sample(self, index: int) -> Any:
        return index, torch.tensor(drawn(), dtype=torch.float64)


class Packed(IterableDataset):
    """Holds some samples ready, and has a state that does not say which."""

    def __init__(self, length: int, most: int = 3) -> None:
        self.length, self.most, self.at = length, most, 0

    def __iter__(self) -> Iterator[int]:
        held: list[int] = []
        while self.at < self.length or held:
            while not held and self.at < self.length:
                held = [*range(self.at, min(self.at + self.most, self.length))]
                self.at += len(held)
            yield held.pop()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def hugging_face(length: int, shards: int = 4) -> Any:
    """Samples {"i": number}."""
    return datasets.Dataset.from_dict({"i": list(range(length))}).to_iterable_dataset(num_shards=shards)


def tars(folder: Path, length: int, shards: int = 4) -> list[str]:
    """Archives as webdataset reads them: sample i is in that of i * shards // length."""
    names = [str(folder / f"{length}-{shard}.tar") for shard in range(shards)]
    for shard, name in enumerate(names):
        with tarfile.open(name, "w") as archive:
            for index in range(length):
                if index * shards // length == shard:
                    entry, content = tarfile.TarInfo(f"{index:04d}.txt"), str(index).encode()
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return names


def web(names: list[str], **options: Any) -> Any:
    """Samples of such archives as numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return webdataset.WebDataset(names, **options)


def number(sample: dict[str, Any]) -> int:
    return int(sample["txt"])
