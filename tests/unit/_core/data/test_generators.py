"""Random draws of data sets are seeded for each sample, with any generator and at any time."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastckpt._core.data import generators
from fastckpt._core.data.generators import seed_generators
from fastckpt.data import ResumableDataLoader
from fastckpt.data.order import SAMPLE
from fastckpt.data.splitmix import mix

DRAWS: dict[str, Callable[[], float]] = {
    "python, normal": lambda: random.gauss(0, 1),
    "all": lambda: torch.rand(1).item() + random.random() + np.random.rand(),
}


class Sometimes(Dataset[Any]):
    """Draws for one sample in five, and none of the first ones."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        return self.draw() if index % 5 == 4 and index > 8 else float(index)


def expected(draw: Callable[[], float]) -> list[float]:
    """Each sample by itself, with all generators seeded for it."""
    samples = []
    for index in range(24):
        seed_generators(mix(SAMPLE, 0, 0, index, 0))
        samples.append(Sometimes(draw)[index])
    return samples


@pytest.mark.parametrize(("known", "num_workers"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("what", DRAWS)
def test_random_draws_of_a_data_set_depend_on_the_sample_alone(
    what: str, num_workers: int, known: bool, monkeypatch
) -> None:
    """And the main process's own generators stay as they were, also while they keep a normal number for later."""
    if not known:
        monkeypatch.setattr(generators, "_known", False)
        monkeypatch.setattr(generators._numpy, "_known", False)
    right = expected(DRAWS[what])
    for normals in (0, 1):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        for _ in range(normals):
            torch.randn(1), random.gauss(0, 1), np.random.randn()
        before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        loader = ResumableDataLoader(Sometimes(DRAWS[what]), 4, num_workers=num_workers)
        assert [x for batch in loader for x in batch.tolist()] == right
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), repr(np.random.get_state()))


class OfTheSeed(Sometimes):
    def __init__(self) -> None: ...

    def __getitem__(self, index: int) -> float:
        return float(torch.initial_seed())


def test_a_generator_created_by_the_data_set_follows_the_seed_of_the_sample() -> None:
    """Nothing is drawn from torch's own then, but it is asked for its seed."""
    loader = ResumableDataLoader(OfTheSeed(), 4)
    right = [float(mix(SAMPLE, 0, 0, index, 0)) for index in range(24)]
    assert [x for batch in loader for x in batch.tolist()] == right


def test_an_error_that_depends_on_random_draws_is_that_of_the_seeded_sample() -> None:
    def draw() -> float:
        if (drawn := torch.rand(1).item()) < 0.5:
            raise ValueError(f"drew {drawn}")
        return drawn

    outcomes = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match="drew") as caught:
            list(ResumableDataLoader(Sometimes(draw), 4))
        outcomes.add(str(caught.value))
    assert len(outcomes) == 1
