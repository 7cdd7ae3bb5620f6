"""A sampler in a plain DataLoader resumes if it is advanced by the samples that were used."""

import random

import pytest
import torch
from torch.utils.data import DataLoader

from fastckpt.data import ResumableSampler
from fastckpt.errors import ConfigError
from tests.unit.data.jobs import Indexed, indices


def test_samples_that_were_used_are_not_drawn_again() -> None:
    draw = random.Random(2)
    for case in range(40):
        length, state, seen, drops = draw.randint(1, 40), None, [], case % 2 == 1
        while True:
            world, batch = draw.randint(1, 4), draw.randint(1, 5)
            samplers = [ResumableSampler(Indexed(length), world, rank, True, 9, drops) for rank in range(world)]
            for sampler in samplers:
                if state:
                    sampler.load_state_dict(state)
            steps = list(zip(*(DataLoader(range(length), batch, sampler=sampler) for sampler in samplers), strict=True))
            kept = steps[: draw.randint(1, 3)]
            for step in kept:
                for sampler, part in zip(samplers, step, strict=True):
                    sampler.advance(len(part))
                seen += torch.stack(step, 1).flatten().tolist()
            states = [sampler.state_dict() for sampler in samplers]
            assert states == states[:1] * world
            state = states[0]
            if len(kept) == len(steps):
                break
        once = seen[:length]
        assert len({*once} & {*range(length)}) == len(once) and (len(once) == length or drops)
        assert -4 < length - len(seen) < 4 and (len(seen) <= length or not drops)


def test_samples_drawn_ahead_by_workers_do_not_count_as_used() -> None:
    sampler = ResumableSampler(Indexed(20), 1, 0)
    batches = iter(DataLoader(Indexed(20), 4, sampler=sampler, num_workers=1, prefetch_factor=4))
    first = indices(next(batches))
    assert sampler.state_dict()["cursor"] == 0
    sampler.advance(len(first))
    again = ResumableSampler(Indexed(20), 1, 0)
    again.load_state_dict(sampler.state_dict())
    assert first + list(again) == list(ResumableSampler(Indexed(20), 1, 0))


def test_a_sampler_without_advance_works_and_refuses_to_save() -> None:
    sampler = ResumableSampler(Indexed(6), 1, 0)
    orders = [list(sampler) for _ in range(2)]
    assert orders[0] != orders[1] and all(sorted(order) == list(range(6)) for order in orders)
    with pytest.raises(ConfigError, match="advance"):
        sampler.state_dict()
