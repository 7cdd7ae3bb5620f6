"""Batches of the example: every block once, and no block lost by a resume."""

import pytest
import torch

from examples.gpt2.data import ShuffledBatches

BLOCK = 8
TOKENS = torch.arange(37 * BLOCK + 1)  # 37 blocks, each known by its first token


def blocks_of(batch) -> list[int]:
    return [first // BLOCK for first in batch[0][:, 0].tolist()]


def ranks(world_size: int, batch_size: int = 3) -> list[ShuffledBatches]:
    return [ShuffledBatches(TOKENS, BLOCK, batch_size, rank, world_size, seed=7) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resume_with_other_ranks_takes_what_is_left_of_the_epoch(world_size):
    before = ranks(2)
    taken = [block for _ in range(3) for rank in before for block in blocks_of(rank.take())]
    after = ranks(world_size)
    for rank in after:
        rank.load_state_dict(before[0].state_dict())
    while after[0].state_dict()["epoch"] == 0:
        taken += [block for rank in after for block in blocks_of(rank.take())]
    assert len(taken) == len(set(taken)) > 37 - 3 * world_size
    rest = [block for rank in after for block in blocks_of(rank.take())]
    assert rest != taken[: len(rest)], "each epoch has an order of its own"
