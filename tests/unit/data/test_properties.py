"""Jobs that are killed at random and come back with other numbers of ranks, batch sizes and workers lose no sample."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.data.split import Remainder, Split
from fastckpt.data.order import ORDER
from fastckpt.data.splitmix import mix, permutation
from tests.unit.data.jobs import Endless, Indexed, Job, in_order

EPOCHS = 3


def run(job: Job, draw: random.Random, change: Any) -> list[int]:
    """Run EPOCHS epochs with kills; returns for each how many samples a whole step took at its end."""
    widths = [0] * EPOCHS
    while True:
        world, batch = change()
        job.start(world, batch_size=batch)
        for _ in range(draw.randrange(1, 12)):
            epoch = job.loaders[0].epoch
            if epoch >= EPOCHS:
                return widths
            more = job.step()
            if not more or draw.random() < 0.5:
                job.commit()
                widths[epoch] = world * batch if not more else widths[epoch]


def check(job: Job, widths: list[int], length: int, rest: str, order: Any) -> None:
    """Each epoch's committed samples are its order, but for what was chosen for its end."""
    for epoch in range(EPOCHS):
        seen = [index for step in job.epochs().get(epoch, []) for index in in_order(step)]
        expected = order(epoch)
        if rest == "uneven":
            assert seen == expected
        elif rest == "drop":
            assert seen == expected[: len(seen)]
            assert length - len(seen) < widths[epoch]
        else:
            assert seen[:length] == expected
            last = job.epochs()[epoch][-1] if length else [[]]
            assert len(seen) - length < len(last)
            assert seen[length:] == (expected * len(last))[: len(seen) - length]
            assert len({len(batch) for batch in last}) == 1


def options(rest: str) -> dict[str, bool]:
    return {"pad": {}, "drop": {"drop_last": True}, "uneven": {"uneven": True}}[rest]


@pytest.mark.parametrize("rest", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("shared", [False, True], ids=["indexed", "a stream"])
@given(length=st.integers(0, 40), seed=st.integers(-(2**63), 2**63 - 1), events=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_each_sample_is_used_once_whatever_changes_between_launches(
    shared: bool, rest: str, length: int, seed: int, events: random.Random
) -> None:
    shuffled = {} if shared else {"shuffle": True, "seed": seed}
    job = Job(Endless(length) if shared else Indexed(length), shuffled | options(rest))
    widths = run(job, events, lambda: (events.randint(1, 5), events.randint(1, 4)))

    def order(epoch: int) -> list[int]:
        return [*range(length)] if shared else permutation(mix(ORDER, seed, epoch), length).tolist()

    check(job, widths, length, rest, order)


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
