"""The order of an epoch is a pure function that never changes."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from fastckpt._core.data.generators import generators_kept
from fastckpt.data.order import DrawnOrder, IndexOrder
from fastckpt.data.splitmix import GAMMA, MASK, mix
from fastckpt.errors import ConfigError
from tests.unit.data.jobs import Indexed


def outputs(key: int, length: int) -> list[int]:
    """SplitMix64 as published, in Python's integers."""
    numbers = []
    for _ in range(length):
        key = (key + GAMMA) & MASK
        z = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ (z >> 31))
    return numbers


def test_the_generator_of_orders_equals_its_published_reference() -> None:
    assert outputs(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]  # Vigna's test vector
    assert [mix((1234567 + i * GAMMA) & MASK) for i in range(3)] == outputs(1234567, 3)


def test_orders_of_epochs_equal_those_of_earlier_versions() -> None:
    """Checkpoints of earlier versions depend on these."""
    order = IndexOrder(Indexed(10), shuffle=True)
    assert order.take(0, 0, range(10)) == GOLDEN[0]
    assert order.take(-7, 3, range(10)) == GOLDEN[1]


GOLDEN = ([7, 2, 3, 5, 1, 9, 0, 8, 4, 6], [2, 7, 9, 8, 0, 1, 5, 4, 6, 3])


def test_orders_drawn_by_samplers_depend_on_seed_and_epoch_alone() -> None:
    sampler = RandomSampler(Indexed(20))
    order, before = DrawnOrder(sampler), torch.get_rng_state()
    first = order.take(5, 0, range(20))
    assert sorted(first) == list(range(20)) and order.take(5, 1, range(20)) != first
    torch.rand(3)
    assert DrawnOrder(RandomSampler(Indexed(20))).take(5, 0, range(20)) == first
    with generators_kept():
        torch.set_rng_state(before)
        order.take(5, 2, range(3))
        assert torch.equal(torch.get_rng_state(), before)
    weighted = DrawnOrder(WeightedRandomSampler([1.0, 2.0, 3.0], 12))
    assert set(weighted.take(0, 0, range(12))) <= {0, 1, 2}


def test_samplers_that_cannot_be_resumed_are_refused() -> None:
    with pytest.raises(ConfigError, match="keeps a generator of its own, generator"):
        DrawnOrder(RandomSampler(Indexed(3), generator=torch.Generator()))
    with pytest.raises(ConfigError, match="shards among ranks by itself"):
        DrawnOrder(DistributedSampler(Indexed(3), num_replicas=2, rank=0))
    with pytest.raises(ConfigError, match="has no length"):
        DrawnOrder(iter(range(3)))


@pytest.mark.parametrize("generator", [np.random.default_rng(7), random.Random(7)])
def test_a_sampler_with_its_own_generator_is_refused_wherever_it_is_stored(generator: Any) -> None:
    class Own(Sampler[int]):
        def __init__(self, **kept: Any) -> None:
            self.__dict__ |= kept

        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Iterator[int]:
            order = list(range(20))
            generator.shuffle(order)
            return iter(order)

    with pytest.raises(ConfigError, match=r"Own keeps a generator of its own, rng, .* leave it out"):
        DrawnOrder(Own(rng=generator))
    with pytest.raises(ConfigError, match="Own gives other keys each time"):
        DrawnOrder(Own()).take(0, 0, range(3))
