"""Jobs that leave and restart their loops, are killed at random and come back changed use each sample in its place.

Other kinds of data are tried by tests/fuzz/test_data.py.
"""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.data.split import Remainder, Split
from fastckpt.data import DataState, ResumableDataLoader, data_state, load_data_state
from fastckpt.data.order import ORDER
from fastckpt.data.splitmix import mix, permutation
from tests.unit.data.jobs import Endless, Indexed, in_order, indices

EPOCHS = 2
RESTS: dict[str, dict[str, Any]] = {"pad": {}, "drop": {"drop_last": True}, "uneven": {"uneven": True}}


class Job:
    """Loaders of some ranks; ``committed`` has for each step (epoch, samples by rank), as of the last commit."""

    def __init__(self, dataset: Any, **common: Any) -> None:
        self.dataset, self.common = dataset, common
        self.saved: list[DataState] = []
        self.committed: list[tuple[int, list[list[int]]]] = []

    def start(self, world: int, batch: int) -> None:
        """Start that many ranks where the last commit was."""
        self.since: list[tuple[int, list[list[int]]]] = []
        places = [{"rank": rank, "num_replicas": world} for rank in range(world)]
        self.loaders = [ResumableDataLoader(self.dataset, batch, **self.common, **place) for place in places]
        self.leave()
        for rank, loader in enumerate(self.loaders if self.saved else ()):
            own = self.saved[rank].own or None if rank < len(self.saved) else None
            load_data_state(loader, self.saved[0].common, own)

    @property
    def epoch(self) -> int:
        return min(loader.epoch for loader in self.loaders)

    def leave(self) -> None:
        """All ranks leave their loops, and begin others."""
        self.iterators: list[Any] = [None] * len(self.loaders)

    def step(self) -> bool:
        """Take a step in all ranks that are in this epoch; False if that was its end."""
        epoch, batches = self.epoch, []
        for rank, loader in enumerate(self.loaders):
            batch = None
            if loader.epoch == epoch:
                self.iterators[rank] = self.iterators[rank] or iter(loader)
                batch = next(self.iterators[rank], None) if loader.epoch == epoch else None
                self.iterators[rank] = None if batch is None else self.iterators[rank]
            batches.append([] if batch is None else indices(batch))
        if any(batches):
            self.since.append((epoch, batches))
        return any(batches)

    def commit(self) -> None:
        """Save, if all ranks took the step; all must say the same."""
        if len({loader.epoch for loader in self.loaders}) == 1:
            self.saved = [data_state(loader) for loader in self.loaders]
            # A rank without a batch has not shown that it takes an iterator for each.
            first, *others = [state.common | {"by_one": 0} for state in self.saved]
            assert others == [first] * len(others)
            self.committed += self.since
            self.since = []

    def run(self, draw: random.Random) -> list[int]:
        """Run EPOCHS epochs with kills; returns for each how many samples a whole step took at its end."""
        widths = [0] * EPOCHS
        while True:
            self.start(world := draw.randint(1, 5), batch := draw.randint(1, 4))
            for _ in range(draw.randrange(1, 12)):
                if draw.random() < 0.15:
                    self.leave()
                if (epoch := self.epoch) >= EPOCHS:
                    return widths
                more = self.step()
                if not more:
                    widths[epoch] = world * batch
                if not more or draw.random() < 0.5:
                    self.commit()


def check(rest: str, steps: list[list[list[int]]], length: int, width: int, expected: list[int]) -> None:
    """The committed samples of an epoch are its order, but for what was chosen for its end."""
    seen = [index for step in steps for index in in_order(step)]
    if rest == "uneven":
        assert seen == expected
    elif rest == "drop":
        assert seen == expected[: len(seen)]
        assert length - len(seen) < width
    else:
        assert seen[:length] == expected
        last = steps[-1] if length else [[]]
        assert len(seen) - length < len(last)
        assert seen[length:] == (expected * len(last))[: len(seen) - length]
        assert len({len(batch) for batch in last}) == 1


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("shared", [False, True], ids=["indexed", "a stream"])
@given(length=st.integers(0, 40), seed=st.integers(-(2**63), 2**63 - 1), events=st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_each_sample_is_used_once_whatever_changes_between_launches(
    shared: bool, rest: str, length: int, seed: int, events: random.Random
) -> None:
    shuffled = {} if shared else {"shuffle": True, "seed": seed}
    job = Job(Endless(length) if shared else Indexed(length), **shuffled, **RESTS[rest])
    for epoch, width in enumerate(job.run(events)):
        steps = [batches for of, batches in job.committed if of == epoch]
        order = [*range(length)] if shared else permutation(mix(ORDER, seed, epoch), length).tolist()
        check(rest, steps, length, width, order)


@pytest.mark.parametrize("rest", list(Remainder))
def test_ranks_share_each_step_by_the_documented_rule(rest: Remainder) -> None:
    """The pure part: thousands of epochs during which world and batch change at each step."""
    draw = random.Random(rest.name)
    for _ in range(300):
        length, cursor, seen, world, batch = draw.randint(0, 60), 0, [], 1, 1
        while True:
            world, batch = draw.randint(1, 9), draw.randint(1, 6)
            splits = [Split(rank, world, batch, rest) for rank in range(world)]
            taken = {split.taken(cursor, length) for split in splits}
            assert len(taken) == 1
            shares = [list(split.positions(cursor, length)) for split in splits]
            step = sorted(position for share in shares for position in share)
            assert all(len(share) <= batch for share in shares)
            if not step:
                break
            seen += step
            cursor += taken.pop()
            sizes = {len(share) for share in shares}
            assert len(sizes) == 1 or (rest is Remainder.UNEVEN and max(sizes) - min(sizes) == 1)
        left = length - cursor
        assert seen == list(range(len(seen)))
        assert len(seen) == cursor if rest is not Remainder.PAD else length <= len(seen) < length + 9
        limit = {Remainder.PAD: 1, Remainder.UNEVEN: 1, Remainder.EVEN: world, Remainder.DROP: world * batch}[rest]
        assert 0 <= left < limit


@pytest.mark.parametrize("rest", list(Remainder))
def test_the_number_of_steps_is_that_of_an_epoch(rest: Remainder) -> None:
    for length, world, batch in itertools.product(range(0, 40, 3), (1, 2, 5), (1, 4)):
        for rank in range(world):
            split = Split(rank, world, batch, rest)
            cursor, steps = 0, 0
            while split.positions(cursor, length):
                cursor += split.taken(cursor, length)
                steps += 1
            assert split.steps(length) == steps
