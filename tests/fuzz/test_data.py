"""Jobs of random kinds of data, ranks and workers, of which starts end anywhere: each sample is used once.

The ranks of a job are loaders of this process. A start goes on from the last commit, whatever was read since then; what
was committed is compared with an uninterrupted job: sample by sample, with the random numbers that each drew.
"""

import io
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import webdataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

from fastckpt.data import ResumableDataLoader, ResumableSampler, data_state, load_data_state
from tests.unit.data.jobs import Endless, Indexed, OwnShards, Remembering, in_order
from tests.unit.data.streams import Buffered, Packed, hugging_face, number, tars, web

JOBS = int(os.environ.get("FASTCKPT_FUZZ_DATA", "300"))
RESTS: dict[str, dict[str, bool]] = {"pad": {}, "drop": {"drop_last": True}, "uneven": {"uneven": True}}
RANKS, BATCH = 3, 5
WIDEST = RANKS * BATCH
"""Samples of a step, at most: fewer may be dropped at the end of an epoch, also by a start that ends then."""
Rows = list[tuple[int, Any]]
"""Samples: their numbers, and what was drawn for each."""
Step = tuple[int, int, list[Rows]]
"""Its epoch, the samples of a whole one, and what each rank got."""


# --- the kinds of data

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


# --- jobs


@dataclass(frozen=True)
class Shape:
    """How a start reads."""

    world: int
    workers: int
    batch: int


class Case:
    """A job, drawn from its number."""

    def __init__(self, seed: int, folder: Path, ends: int) -> None:
        self.seed, self.name, self.folder = seed, list(KINDS)[seed % len(KINDS)], folder
        self.kind, draw = KINDS[self.name], random.Random(seed)
        self.length = draw.choice([draw.randrange(4), draw.randrange(60), *2 * [draw.randrange(60, 200)]])
        self.epochs, self.rest = draw.randint(1, 3), draw.choice(list(RESTS)) if self.kind.rests else "uneven"
        self.ends = draw.randint(1, ends)
        self.first = self._shape(draw)

    def shape(self, start: int) -> Shape:
        return self.first if self.kind.fixed else self._shape(random.Random(f"{self.seed}/{start}"))

    def _shape(self, draw: random.Random) -> Shape:
        return Shape(draw.randint(1, RANKS), draw.randint(0, self.kind.workers), draw.randint(1, BATCH))

    def loaders(self, shape: Shape, rest: str) -> list[ResumableDataLoader]:
        """Those of all ranks, of a process that has just begun."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        numpy.random.seed(self.seed)
        made = []
        for rank in range(shape.world):
            options = self.kind.make(Place(self.length, self.seed % 1000, rank, shape.world, self.folder))
            options |= RESTS[rest] if self.kind.rests else {}
            options |= {"batch_size": shape.batch} if self.kind.batched else {}
            if "sampler" not in options or self.name != "resumable_sampler":
                options |= {"num_replicas": shape.world, "rank": rank}
            made.append(ResumableDataLoader(num_workers=shape.workers, **options))
        return made

    def steps(self, loaders: list[ResumableDataLoader], shape: Shape) -> Iterator[Step]:
        while (epoch := loaders[0].epoch) < self.epochs:
            iterators = [iter(loader) for loader in loaders]
            while any(batches := [rows(next(each, None)) for each in iterators]):
                yield epoch, shape.batch * shape.world, batches

    def __str__(self) -> str:
        return f"{self.name}, {self.length} samples, {self.epochs} epochs, {self.rest}"


def rows(batch: Any) -> Rows:
    if batch is None:
        return []
    if isinstance(batch, dict):
        batch = batch["i"]
    if isinstance(batch, list | tuple):
        return list(zip(batch[0].tolist(), map(tuple, batch[1].tolist()), strict=True))
    return [(each, None) for each in batch.tolist()]


def used_by(case: Case) -> list[Step]:
    """What was committed by a job whose first starts end after some steps."""
    saved, used = io.BytesIO(), list[Step]()
    for start in itertools.count():
        draw, shape, since = random.Random(f"{case.seed}:{start}"), case.shape(start), list[Step]()
        last = draw.randint(1, 10) if start < case.ends else None
        loaders = case.loaders(shape, case.rest)
        if saved.tell():
            saved.seek(0)
            states = torch.load(saved, weights_only=True)
            for rank, loader in enumerate(loaders):
                load_data_state(loader, states[0][0], states[rank][1] if rank < len(states) else None)
        with closing(case.steps(loaders, shape)) as steps:
            for number, step in enumerate(steps, 1):
                since.append(step)
                if len({loader.epoch for loader in loaders}) == 1 and draw.random() > 0.4:
                    torch.save([tuple(data_state(loader)) for loader in loaders], saved := io.BytesIO())
                    used, since = used + since, []
                if number == last:
                    break
            else:
                return used + since
    raise AssertionError


def check(case: Case, used: list[Step]) -> None:
    """Compare with a job that was never interrupted."""
    shape = case.first if case.kind.fixed else Shape(1, 0, 1)
    expected = [*case.steps(case.loaders(shape, case.rest if case.kind.fixed else "uneven"), shape)]
    for epoch in range(case.epochs):
        there, got = ([batches for number, _, batches in each if number == epoch] for each in (expected, used))
        width = next((wide for number, wide, _ in reversed(used) if number == epoch), 0)
        flat = in_order if case.kind.batched else _one_after_the_other
        everything = [row for batches in there for row in flat(batches)]
        if case.kind.once:
            ids = Counter(row[0] for row in everything)
            assert set(ids.values()) <= {1} and set(ids) == set(range(len(ids))), f"{case}: the job itself: {ids}"
            assert len(ids) >= case.length
        where = f"job {case.seed}: {case}: epoch {epoch}"
        if case.kind.fixed:
            for rank in range(shape.world):
                mine, theirs = ([row for batches in each for row in batches[rank]] for each in (got, there))
                assert mine == theirs, f"{where}, rank {rank}, {shape}: {told(mine, theirs)}"
        else:
            compare([row for batches in got for row in flat(batches)], everything, width, case.rest, where)


def compare(seen: Rows, expected: Rows, width: int, rest: str, where: str) -> None:
    """By the rule for the end of an epoch."""
    where, length = f"{where}: {told(seen, expected)}", len(expected)
    if rest == "drop":
        assert seen == expected[: len(seen)] and length - len(seen) < WIDEST, where
        return
    assert seen[:length] == expected, where
    assert len(seen) - length < (1 if rest == "uneven" else max(width, 1)), where
    assert {row[0] for row in seen[length:]} <= {row[0] for row in expected}, where


def _one_after_the_other(batches: list[Rows]) -> Rows:
    return [row for batch in batches for row in batch]


def told(seen: Rows, expected: Rows) -> str:
    """How they differ."""
    first = next((i for i, pair in enumerate(zip(seen, expected, strict=False)) if pair[0] != pair[1]), "none")
    return f"{len(seen)} samples instead of {len(expected)}, the first other one at {first}"


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("jobs", "ends"),
    [pytest.param(len(KINDS), 2, id="some"), pytest.param(JOBS, 6, marks=pytest.mark.campaign, id="many")],
)
def test_random_jobs_use_each_sample_of_each_kind_of_data_once(tmp_path: Path, jobs: int, ends: int) -> None:
    for seed in range(jobs):
        case = Case(seed, tmp_path, ends)
        check(case, used_by(case))
