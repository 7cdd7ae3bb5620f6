"""The kinds of data that the fuzzer of data has: one entry each, with what is known of it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import webdataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from fastckpt.data import ResumableSampler
from tests.unit.data.jobs import Endless, Indexed, OwnShards, Remembering
from tests.unit.data.streams import Buffered, Packed, hugging_face, number, tars, web

Options = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """For whom data are made.

    Attributes:
        length: Samples, numbered from 0.
        seed: Of what shuffles.
        folder: Files may be made there, once per job.
    """

    length: int
    seed: int
    rank: int
    world: int
    folder: Path


@dataclass(frozen=True)
class Kind:
    """A kind of data.

    Attributes:
        make: The data set and further arguments of `ResumableDataLoader` on a rank.
        fixed: Whether it goes on with as many ranks, workers and samples per batch only.
        once: Whether each sample is used once in an epoch; others are compared with an uninterrupted job alone.
        workers: The most loader workers.
        rests: Whether the end of an epoch can be padded, dropped or uneven.
        batched: Whether batch_size may be given.
    """

    make: Callable[[Place], Options]
    fixed: bool = False
    once: bool = True
    workers: int = 2
    rests: bool = True
    batched: bool = True


def batches(place: Place) -> Options:
    sampler = BatchSampler(SequentialSampler(range(place.length)), 3, drop_last=False)
    return {"dataset": Indexed(place.length), "batch_sampler": sampler, "uneven": True}


def weighted(place: Place) -> Options:
    weights = [1.0 + index % 3 for index in range(place.length + 1)]
    return {"dataset": Indexed(len(weights)), "sampler": WeightedRandomSampler(weights, place.length + 5)}


def resumable(place: Place) -> Options:
    dataset = Indexed(place.length)
    return {"dataset": dataset, "sampler": ResumableSampler(dataset, place.world, place.rank, seed=place.seed)}


def drawn_at_random(place: Place) -> Options:
    dataset = Indexed(max(place.length, 1))
    return {"dataset": dataset, "sampler": RandomSampler(dataset), "seed": place.seed}


def of_tars(place: Place, **splitters: Any) -> Any:
    options = {"shardshuffle": 4, "seed": place.seed, "detshuffle": True, "empty_check": False, **splitters}
    made = web(tars(place.folder, place.length), **options)
    return made.compose(webdataset.detshuffle(20, seed=place.seed)).map(number)


def web_shards(place: Place) -> Options:
    def mine(source: Iterator[Any]) -> Iterator[Any]:
        return itertools.islice(source, place.rank, None, place.world)

    return {"dataset": of_tars(place, nodesplitter=mine), "sharded": True}


def hugging_face_split(place: Place) -> Options:
    made = hugging_face(max(place.length, 12), 12).shuffle(seed=place.seed, buffer_size=15)
    return {"dataset": split_dataset_by_node(made, place.rank, place.world), "sharded": True}


def hugging_face_dealt(place: Place) -> Options:
    return {"dataset": hugging_face(max(place.length, 4)).shuffle(seed=place.seed, buffer_size=15)}


class Iterated(IterableDataset):
    """Its iterator has the state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return _Numbers(self.length)


class _Numbers:
    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> "_Numbers":
        return self

    def __next__(self) -> int:
        if self.at >= self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


SHARDS = {"fixed": True, "rests": False}
KINDS: dict[str, Kind] = {
    "indexed": Kind(lambda of: {"dataset": Indexed(of.length)}),
    "shuffled": Kind(lambda of: {"dataset": Indexed(of.length), "shuffle": True, "seed": of.seed}),
    "resumable_sampler": Kind(resumable),
    "random_sampler": Kind(drawn_at_random),
    "weighted_sampler": Kind(weighted, once=False),
    "batch_sampler": Kind(batches, batched=False, rests=False),
    "stream": Kind(lambda of: {"dataset": Endless(of.length)}),
    "buffered_by_seed_and_epoch": Kind(lambda of: {"dataset": Buffered(of.length, of.seed)}),
    "buffered_by_the_global_generator": Kind(lambda of: {"dataset": Buffered(of.length, "global"), "seed": of.seed}),
    "web_shared": Kind(lambda of: {"dataset": of_tars(of, nodesplitter=None, workersplitter=None)}),
    "own_shards": Kind(lambda of: {"dataset": OwnShards(of.length, of.rank, of.world), "sharded": True}, **SHARDS),
    "web_shards": Kind(web_shards, **SHARDS),
    "hugging_face_shards": Kind(hugging_face_split, **SHARDS),
    "with_a_state": Kind(lambda of: {"dataset": Remembering(of.length)}, **SHARDS),
    # Each rank reads all of it.
    "iterator_with_a_state": Kind(
        lambda of: {"dataset": Iterated(of.length), "sharded": True}, **SHARDS, workers=0, once=False
    ),
    "with_a_state_counted": Kind(lambda of: {"dataset": Remembering(of.length), "count": True}, **SHARDS),
    "with_a_lossy_state": Kind(lambda of: {"dataset": Packed(of.length, 2 + of.seed % 9)}, **SHARDS),
    "hugging_face_dealt": Kind(hugging_face_dealt, **SHARDS, workers=0),
}
"""By name; add an entry, and it is fuzzed."""
