"""Uses and accidents by which samples could be lost or used twice: handled, refused or warned of."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from fastckpt.data import ResumableDataLoader, ResumableSampler, data_state, load_data_state
from fastckpt.errors import ConfigError
from tests.unit.data.jobs import Endless, Indexed, OwnShards, Remembering, indices


def one(dataset: Any, batch_size: int = 2, **options: Any) -> ResumableDataLoader:
    return ResumableDataLoader(dataset, batch_size, num_replicas=1, rank=0, **options)


class TestSamplers:
    @pytest.mark.parametrize(
        ("sampler", "says"),
        [
            (DistributedSampler(range(16), 2, 0), "DistributedSampler shards among ranks"),
            (ResumableSampler(range(16), 2, 0), "ResumableSampler shards among ranks"),
            (RandomSampler(range(16), generator=torch.Generator()), "RandomSampler keeps a generator"),
        ],
    )
    def test_samplers_within_a_batch_sampler_are_recognized(self, sampler: Any, says: str) -> None:
        batches = BatchSampler(BatchSampler(sampler, 1, False), 2, False)
        with pytest.raises(ConfigError, match=says):
            ResumableDataLoader(Indexed(16), batch_sampler=batches, num_replicas=2, rank=0)

    def test_samplers_warn_of_samples_dropped_by_a_loader_and_end_their_epoch(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        sampler = ResumableSampler(range(10), 1, 0)
        loader, batches = DataLoader(range(10), 4, sampler=sampler, drop_last=True), []
        for _ in range(4):
            batches.append([sampler.advance(len(batch)) for batch in loader])
            assert sampler.state_dict()["cursor"] == 8
        assert [len(each) for each in batches] == [2, 0, 2, 0]
        assert "did not count 2 samples of each rank" in caplog.text
        assert sampler.position.epoch == 1


class TestEpochs:
    def test_epochs_of_loops_that_stop_at_the_last_batch_end(self) -> None:
        loader = one(Indexed(8), accumulate=3)
        for epoch in range(3):
            taken = [i for batch in islice(loader, len(loader)) for i in indices(batch)]
            assert (taken, loader.epoch, loader.ended) == (list(range(8)), epoch, True)
            resumed = one(Indexed(8))
            resumed.load_state_dict(loader.state_dict())
            assert not list(resumed)
            assert indices(next(iter(resumed))) == [0, 1]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_epochs_of_data_that_change_during_iteration_are_refused(self, workers: int) -> None:
        data, used = Indexed(12), []
        with pytest.raises(ConfigError, match="epoch 0 began with 12 samples, and now there are 14"):
            for batch in one(data, shuffle=True, num_workers=workers):
                used += indices(batch)
                data.length = 14
        assert len(used) < 12

    @pytest.mark.parametrize("world", [1, 3])
    def test_data_may_change_after_a_finished_epoch(self, world: int) -> None:
        """As data that grow are resumed from what was kept of the end of an epoch."""
        ended = one(Indexed(8), shuffle=True)
        list(islice(ended, len(ended)))
        for shuffle in (True, False):
            again = ResumableDataLoader(Indexed(12), 2, shuffle, num_replicas=world, rank=0)
            again.load_state_dict(ended.state_dict())
            assert (list(again), again.epoch) == ([], 1)
            assert sum(len(indices(batch)) for batch in again) == 12 // world


class Flaky(IterableDataset):
    """Cannot be read at one place, once."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __iter__(self) -> Iterator[int]:
        for i in range(12):
            if i == self.bad:
                self.bad = -1
                raise OSError("flaky")
            yield i


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("bad", "options"), [(0, {}), (5, {"num_workers": 1, "persistent_workers": True})])
def test_an_error_of_a_stream_does_not_end_the_epoch(bad: int, sharded: bool, options: dict[str, Any]) -> None:
    loader, used, errors = one(Flaky(bad), sharded=sharded, repeatable=True, **options), [], 0
    while loader.epoch == 0:
        try:
            for batch in loader:
                used += batch.tolist()
        except OSError:
            errors += 1
    assert (used, errors) == (list(range(12)), 1)


@pytest.mark.parametrize("make", [Endless, OwnShards])
def test_a_stream_that_ends_before_the_saved_position_is_refused(make: Callable[[int], Any]) -> None:
    def start(length: int) -> ResumableDataLoader:
        return one(make(length), sharded=make is OwnShards)

    loader = start(12)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    shorter = start(6)
    load_data_state(shorter, *data_state(loader))
    with pytest.raises(ConfigError, match="8 samples of the stream were used, but it has 6 only"):
        next(iter(shorter))
    just = start(8)
    load_data_state(just, *data_state(loader))
    assert list(just) == []


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_an_iteration_that_was_broken_off_changes_no_later_batch(options: dict[str, Any]) -> None:
    loader = one(Remembering(8), **options)
    for batch in loader:
        if 2 in batch.tolist():
            break
    loader.set_epoch(1)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


class Stops(Indexed):
    def __getitem__(self, index: int) -> int:
        return index if index != 4 else next(iter(()))


def stop_at_4(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) if 4 not in samples else next(iter(()))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Stops(8), {"num_workers": 1}),
        (range(8), {"collate_fn": stop_at_4}),
        (Flaky(-1), {"collate_fn": stop_at_4}),
    ],
)
def test_a_stop_iteration_raised_by_a_data_set_does_not_end_the_epoch(dataset: Any, options: dict[str, Any]) -> None:
    loader = one(dataset, **options)
    with pytest.raises(RuntimeError, match="epoch 0 broke off before its end"):
        list(loader)
    assert (loader.epoch, loader.state_dict()["cursor"]) == (0, 4)


def test_a_loader_created_before_the_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [ResumableDataLoader(Indexed(8)), ResumableSampler(range(8))]
    given = [ResumableDataLoader(Indexed(8), num_replicas=1, rank=0), ResumableSampler(range(8), 1, 0)]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        for each in made:
            with pytest.raises(
                ConfigError, match=r"before init_process_group\(\) for rank 0 of 1, and there are 2 ranks"
            ):
                iter(each)
        for each in given:
            assert len(list(each)) == 8
    finally:
        torch.distributed.destroy_process_group()


def test_a_stream_with_a_counting_loader_of_its_own_is_refused_naming_it() -> None:
    """As MosaicML's StreamingDataset, whose methods these are."""

    class Streaming(Endless):
        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
            raise AssertionError

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    for options in ({}, {"sharded": True}, {"num_workers": 2, "count": True}):
        with pytest.raises(ConfigError, match="give data= that one, such as streaming"):
            one(Streaming(8), **options)
