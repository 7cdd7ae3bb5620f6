"""Loader workers, prefetching and resumes change no batch: not its samples, not their random transforms."""

import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from fastckpt.data import ResumableDataLoader
from fastckpt.data.streams.checksum import checksum
from fastckpt.errors import ConfigError
from tests.support.forked_programs import run
from tests.unit.data.jobs import Endless, Indexed, OwnShards, Remembering, drawn, indices

SEEDED = {"num_replicas": 1, "rank": 0, "seed": 11}


def seen(texts: set[str]) -> int:
    """Of samples whose order or addresses differ between processes."""
    return checksum([texts, "a0", b"1", {"x": {"y": 1}}, torch.ones(2), object()])


class Checked(Indexed):
    """Samples with their checksums."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), seen({"a", "b", f"c{index}"})


def collate(samples: list[Any]) -> list[Any]:
    """Draws, too."""
    return [*default_collate(samples), torch.tensor(drawn(), dtype=torch.float64)]


def spawn() -> None:
    """Two epochs by workers of each way, beside those without; hashes of what is spawned are its own."""
    os.environ["PYTHONHASHSEED"] = "1"

    def batches(**way: Any) -> list[Any]:
        loader = ResumableDataLoader(Checked(9), 2, True, collate_fn=collate, **SEEDED, **way)
        return [tensor for _ in range(2) for batch in loader for tensor in batch]

    expected = batches()
    assert len(expected) == 2 * 5 * 4
    for way in ({"multiprocessing_context": "spawn"}, {"prefetch_factor": 5}, {"multiprocessing_context": "fork"}):
        assert all(map(torch.equal, batches(num_workers=1, persistent_workers=True, **way), expected))
    assert all(map(torch.equal, batches(num_workers=2, timeout=60), expected))


def test_spawned_and_forked_workers_draw_the_same_and_have_the_same_checksums(
    tmp_path: Path, forked_launchers: None
) -> None:
    """In a process of its own: spawning leaves it one that tracks resources."""
    program = "if __name__ == '__main__':\n    from tests.unit.data.test_workers import spawn\n    spawn()"
    assert run(tmp_path, program, [()]) == [(0, "")]


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
