"""Loader workers, prefetching and resumes change no batch: not its samples, not their random transforms."""

import gc
import itertools
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from fastckpt.data import ResumableDataLoader
from fastckpt.errors import ConfigError
from tests.unit.data.jobs import Endless, Indexed, OwnShards, Remembering, drawn, indices

SEEDED = {"num_replicas": 1, "rank": 0, "seed": 11}


def collate(samples: list[Any]) -> list[Any]:
    """Draws, too."""
    return [*default_collate(samples), torch.tensor(drawn(), dtype=torch.float64)]


def equal(batch: Any, other: Any) -> bool:
    return len(batch) == len(other) and all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


def uninterrupted(dataset: Any, epochs: int, **options: Any) -> list[Any]:
    loader = ResumableDataLoader(dataset, collate_fn=collate, **SEEDED, **options)
    return [batch for _ in range(epochs) for batch in loader]


def every_epoch(loader: ResumableDataLoader, epochs: int) -> Iterator[Any]:
    while loader.epoch < epochs:
        yield from loader


@pytest.mark.parametrize("dataset", [Indexed(37), Endless(37)], ids=lambda d: type(d).__name__)
def test_a_resumed_run_with_loader_workers_is_bit_equal(dataset: Any) -> None:
    """Killed every seven steps, two of them not committed, and started with other workers each time."""
    options = {"batch_size": 3} | ({} if isinstance(dataset, Endless) else {"shuffle": True})
    expected = uninterrupted(dataset, 3, **options)
    ways = [
        {"num_workers": 2, "prefetch_factor": 5},
        {"num_workers": 0},
        {"num_workers": 2, "persistent_workers": True, "pin_memory": torch.cuda.is_available()},
        {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 60},
    ]
    batches: list[Any] = []
    state: dict[str, Any] = {}
    for way in itertools.cycle(ways):
        loader = ResumableDataLoader(dataset, collate_fn=collate, **SEEDED, **options, **way)
        if state:
            loader.load_state_dict(state)
        taken = []
        for batch in itertools.islice(every_epoch(loader, 3), 7):
            taken.append(batch)
            if len(taken) == 5:
                state = loader.state_dict()
        del batch
        batches += taken[:5] if len(taken) == 7 else taken
        if len(taken) < 7:
            break
    assert len(batches) == len(expected) == 39
    assert all(equal(batch, other) for batch, other in zip(batches, expected, strict=True))


def spawn() -> None:
    options = {"batch_size": 2, "shuffle": True}
    expected = uninterrupted(Indexed(9), 1, **options)
    batches = uninterrupted(Indexed(9), 1, **options, num_workers=1, multiprocessing_context="spawn")
    assert len(batches) == 5 and all(map(equal, batches, expected))


def test_spawned_and_forked_workers_draw_the_same() -> None:
    """In a process of its own: spawning leaves it one that tracks resources."""
    command = "from tests.unit.data.test_workers import spawn; __name__ == '__main__' and spawn()"
    subprocess.run([sys.executable, "-c", command], cwd=Path(__file__).parents[3], check=True, timeout=120)


def test_persistent_workers_follow_a_position_that_was_set() -> None:
    for dataset in (Indexed(10), Endless(10)):
        loader = ResumableDataLoader(dataset, 2, num_workers=2, persistent_workers=True, **SEEDED)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        assert indices(next(iterator)) == [2, 3]
        loader.load_state_dict(state)
        with pytest.raises(RuntimeError, match="position was set"):
            next(iterator)
        assert [indices(batch) for batch in loader] == [[2, 3], [4, 5], [6, 7], [8, 9]]
        assert next(indices(batch) for batch in loader) == [0, 1]


def test_a_data_set_that_asks_for_its_worker_is_refused_unless_sharded_is_set() -> None:
    loader = ResumableDataLoader(OwnShards(8), 2, num_workers=2, **SEEDED)
    with pytest.raises(ConfigError, match=r"get_worker_info\(\).id.*sharded=True"):
        next(iter(loader))


@pytest.mark.gpu
def test_batches_are_pinned_with_pin_memory() -> None:
    for workers in (0, 2):
        for dataset in (Indexed(6), Endless(6), Remembering(6)):
            loader = ResumableDataLoader(dataset, 3, num_workers=workers, pin_memory=True, **SEEDED)
            batches = list(loader)
            tensors = [tensor for batch in batches for tensor in (batch if isinstance(batch, list) else [batch])]
            assert len(batches) == 2 and all(tensor.is_pinned() for tensor in tensors)


class Flawed(Indexed):
    """Cannot give one sample, until it is mended."""

    flaw = 5

    def __getitem__(self, index: int) -> Any:
        if index == self.flaw:
            raise OSError("cannot read sample 5")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_set_loses_no_sample_and_ends_all_workers(workers: int) -> None:
    """Not when garbage is collected, which would wait 5 s for each."""
    dataset = Flawed(12)
    loader = ResumableDataLoader(dataset, 2, num_workers=workers, **SEEDED)
    seen = []
    gc.disable()
    try:
        with pytest.raises(OSError, match="sample 5"):
            for batch in loader:
                seen.append(indices(batch))
        assert not multiprocessing.active_children()
    finally:
        gc.enable()
    dataset.flaw = -1
    assert seen + [indices(batch) for batch in loader] == [[i, i + 1] for i in range(0, 12, 2)]
