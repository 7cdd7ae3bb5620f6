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
    Subset,
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
        refused: What the first start says; empty if it starts.
        batched: Whether batch_size may be given.
    """

    make: Callable[[Place], Options]
    fixed: bool = False
    once: bool = True
    workers: int = 2
    rests: bool = True
    refused: str = ""
    batched: bool = True


KINDS: dict[str, Kind] = {}
"""By name; add an entry, and it is fuzzed."""


def kind(**known: Any) -> Callable[[Callable[[Place], Options]], Callable[[Place], Options]]:
    def add(make: Callable[[Place], Options]) -> Callable[[Place], Options]:
        KINDS[make.__name__] = Kind(make, **known)
        return make

    return add


# ---------- with indices ----------


@kind()
def indexed(place: Place) -> Options:
    return {"dataset": Indexed(place.length)}


@kind()
def shuffled(place: Place) -> Options:
    return {"dataset": Indexed(place.length), "shuffle": True, "seed": place.seed}


@kind()
def subset(place: Place) -> Options:
    return {"dataset": Subset(Indexed(place.length), range(place.length)), "shuffle": True}


@kind()
def resumable_sampler(place: Place) -> Options:
    dataset = Indexed(place.length)
    return {"dataset": dataset, "sampler": ResumableSampler(dataset, place.world, place.rank, seed=place.seed)}


@kind()
def random_sampler(place: Place) -> Options:
    dataset = Indexed(max(place.length, 1))
    return {"dataset": dataset, "sampler": RandomSampler(dataset), "seed": place.seed}


@kind(once=False)
def weighted_sampler(place: Place) -> Options:
    weights = [1.0 + index % 3 for index in range(place.length + 1)]
    return {"dataset": Indexed(place.length + 1), "sampler": WeightedRandomSampler(weights, place.length + 5)}


@kind(batched=False, rests=False)
def batch_sampler(place: Place) -> Options:
    return {
        "dataset": Indexed(place.length),
        "batch_sampler": BatchSampler(SequentialSampler(range(place.length)), 3, drop_last=False),
        "uneven": True,
    }


# ---------- streams that all read ----------


@kind()
def stream(place: Place) -> Options:
    return {"dataset": Endless(place.length)}


@kind()
def buffered_by_seed_and_epoch(place: Place) -> Options:
    return {"dataset": Buffered(place.length, place.seed)}


@kind()
def buffered_by_the_global_generator(place: Place) -> Options:
    return {"dataset": Buffered(place.length, "global"), "seed": place.seed}


@kind()
def web_shared(place: Place) -> Options:
    names = tars(place.folder, place.length)
    made = web(names, shardshuffle=4, seed=place.seed, detshuffle=True, nodesplitter=None, workersplitter=None,
               empty_check=False)  # fmt: skip
    return {"dataset": made.compose(webdataset.detshuffle(20, seed=place.seed)).map(number)}


# ---------- shards ----------


@kind(fixed=True, rests=False)
def own_shards(place: Place) -> Options:
    return {"dataset": OwnShards(place.length, place.rank, place.world), "sharded": True}


@kind(fixed=True, rests=False)
def web_shards(place: Place) -> Options:
    names = tars(place.folder, place.length)

    def mine(source: Iterator[Any]) -> Iterator[Any]:
        return itertools.islice(source, place.rank, None, place.world)

    made = web(names, shardshuffle=4, seed=place.seed, detshuffle=True, nodesplitter=mine, empty_check=False)
    made = made.compose(webdataset.detshuffle(20, seed=place.seed)).map(number)
    return {"dataset": made, "sharded": True}


@kind(fixed=True, rests=False)
def hugging_face_shards(place: Place) -> Options:
    made = hugging_face(max(place.length, 12), 12)
    return {"dataset": split_dataset_by_node(made, place.rank, place.world), "sharded": True}


@kind(fixed=True, rests=False)
def hugging_face_shards_shuffled(place: Place) -> Options:
    made = hugging_face(max(place.length, 12), 12).shuffle(seed=place.seed, buffer_size=15)
    return {"dataset": split_dataset_by_node(made, place.rank, place.world), "sharded": True}


# ---------- streams with states, dealt out ----------


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


@kind(fixed=True, rests=False)
def with_a_state(place: Place) -> Options:
    return {"dataset": Remembering(place.length)}


@kind(fixed=True, rests=False, workers=0, once=False)  # each rank reads all of it
def iterator_with_a_state(place: Place) -> Options:
    return {"dataset": Iterated(place.length), "sharded": True}


@kind(fixed=True, rests=False)
def with_a_state_counted(place: Place) -> Options:
    return {"dataset": Remembering(place.length), "count": True}


@kind(fixed=True, rests=False)
def with_a_lossy_state(place: Place) -> Options:
    return {"dataset": Packed(place.length, 2 + place.seed % 9)}


@kind(fixed=True, rests=False, workers=0)
def hugging_face_dealt(place: Place) -> Options:
    return {"dataset": hugging_face(max(place.length, 4))}


@kind(fixed=True, rests=False, workers=0)
def hugging_face_dealt_shuffled(place: Place) -> Options:
    return {"dataset": hugging_face(max(place.length, 4)).shuffle(seed=place.seed, buffer_size=15)}


# ---------- refused ----------


@kind(refused="Buffered gives other samples when it is opened again")
def buffered_without_a_seed(place: Place) -> Options:
    return {"dataset": Buffered(place.length + 50)}


@kind(refused="WebDataset gives other samples when it is opened again")
def web_without_a_seed(place: Place) -> Options:
    names = tars(place.folder, place.length + 50)
    made = web(names, shardshuffle=False, nodesplitter=None, workersplitter=None, empty_check=False)
    return {"dataset": made.shuffle(20).map(number)}
