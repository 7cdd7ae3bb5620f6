"""Loops that are left and restarted, in jobs that are killed and come back changed: each sample counts once."""

import random
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import BatchSampler, RandomSampler

from fastckpt.data import DataState, ResumableDataLoader, ResumableSampler, data_state, load_data_state
from tests.unit.data.jobs import Endless, Indexed, OwnShards, Remembering, indices

CASES = 40


class Ranks:
    """The loaders of a job, which leave their loops and restart them at any time."""

    def __init__(self, kind: str, length: int, rest: dict[str, Any]) -> None:
        self.kind, self.length, self.rest = kind, length, rest

    def start(self, world: int, batch: int, saved: list[DataState]) -> None:
        self.loaders = [self._loader(rank, world, batch) for rank in range(world)]
        self.iterators: list[Any] = [None] * world
        for rank, loader in enumerate(self.loaders if saved else ()):
            own = saved[rank].own or None if rank < len(saved) else None
            load_data_state(loader, saved[0].common, own)

    def _loader(self, rank: int, world: int, batch: int) -> ResumableDataLoader:
        place = {"rank": rank, "num_replicas": world}
        if self.kind == "batches":
            batches = BatchSampler(RandomSampler(range(self.length)), 2, False)
            return ResumableDataLoader(Indexed(self.length), batch_sampler=batches, **place)
        if self.kind == "sampler":
            sampler = ResumableSampler(range(self.length), world, rank, drop_last="drop_last" in self.rest)
            return ResumableDataLoader(Indexed(self.length), batch, sampler=sampler)
        if self.kind == "own":
            return ResumableDataLoader(OwnShards(self.length, rank, world), batch, sharded=True, **place)
        dataset = {"indexed": Indexed, "stream": Endless, "state": Remembering}[self.kind](self.length)
        return ResumableDataLoader(dataset, batch, self.kind == "indexed", **place, **self.rest)

    def step(self) -> list[int]:
        """What all ranks use that are not through with the first epoch."""
        used: list[int] = []
        for rank, loader in enumerate(self.loaders):
            if loader.epoch == 0:
                self.iterators[rank] = self.iterators[rank] or iter(loader)
                batch = next(self.iterators[rank], None) if loader.epoch == 0 else None
                used += [] if batch is None else indices(batch)
                self.iterators[rank] = None if batch is None else self.iterators[rank]
        return used

    @property
    def over(self) -> bool:
        return all(loader.epoch > 0 for loader in self.loaders)


def epoch_of(job: Ranks, events: random.Random) -> Counter[int]:
    """How often each sample counts in an epoch."""
    counted, since, saved = Counter[int](), Counter[int](), list[DataState]()
    fixed = job.kind in ("own", "state")
    world = events.randint(1, 3)
    job.start(world, events.randint(1, 5), saved)
    while not job.over:
        what = events.random()
        if what < 0.12:
            job.iterators = [None] * world
        elif what < 0.3 and len({loader.epoch for loader in job.loaders}) == 1:
            saved = [data_state(loader) for loader in job.loaders]
            assert all(state.common == saved[0].common for state in saved)
            counted, since = counted + since, Counter()
        elif what < 0.38:
            world = world if fixed else events.randint(1, 3)
            job.start(world, events.randint(1, 5), saved)
            since = Counter()
        else:
            since.update(job.step())
    return counted + since


@pytest.mark.parametrize("kind", ["indexed", "stream", "state", "own", "batches", "sampler"])
def test_loops_that_are_left_and_restarted_use_each_sample_once(kind: str) -> None:
    for case in range(CASES):
        events = random.Random(f"{kind} {case}")
        rests: list[dict[str, Any]] = [{}, {"drop_last": True}]
        rest = events.choice([*rests, {"uneven": True}] if kind in ("indexed", "stream") else rests)
        rest = {} if kind in ("state", "own", "batches") else rest
        length = events.randint(1, 40)
        counted = epoch_of(Ranks(kind, length, rest), events)
        missing, more = length - len(counted), counted.total() - len(counted)
        assert missing == 0 or (rest == {"drop_last": True} and missing < 3 * 5), (case, counted)
        padded = rest == {} and kind not in ("state", "own")
        assert more == 0 or (padded and more < (3 * 2 if kind == "batches" else 3)), (case, counted)
