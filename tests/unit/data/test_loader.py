"""A loader: when its epochs end, what it refuses, and what its state is."""

import io
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterDataPipe

from fastckpt.data import ResumableDataLoader, ResumableSampler
from fastckpt.errors import ConfigError
from tests.unit.data.jobs import Endless, Indexed, Remembering, indices


def loader_of(length: int = 10, batch_size: int | None = 2, **options: Any) -> ResumableDataLoader:
    return ResumableDataLoader(Indexed(length), batch_size, **options)


def resumed(loader: ResumableDataLoader, **options: Any) -> ResumableDataLoader:
    other = ResumableDataLoader(loader.dataset, loader.batch_size, **options)
    other.load_state_dict(through_a_file(loader.state_dict()))
    other.load_rank_state_dict(through_a_file(loader.rank_state_dict()))
    return other


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_an_epoch_ends_with_its_loop_and_not_with_its_last_batch() -> None:
    """So that what follows the loop, such as a validation, comes after a resume, too."""
    loader = loader_of(4)
    iterator = iter(loader)
    next(iterator), next(iterator)
    again = resumed(loader)
    assert again.epoch == 0 and list(again) == [] and again.epoch == 1
    assert len(list(again)) == 2
    assert next(iterator, None) is None
    assert resumed(loader).state_dict() == loader.state_dict() == {**loader.state_dict(), "epoch": 1, "cursor": 0}


def test_a_new_iterator_continues_where_the_former_one_stopped() -> None:
    loader = loader_of()
    assert [indices(batch) for batch in islice(loader, 2)] == [[0, 1], [2, 3]]
    older = iter(loader)
    assert indices(next(older)) == [4, 5]
    assert indices(next(iter(loader))) == [6, 7]
    with pytest.raises(RuntimeError, match="another iteration"):
        next(older)


@pytest.mark.parametrize(("length", "sampler_drops", "loader_drops"), [(7, False, False), (7, True, True)])
def test_without_shuffling_batches_equal_those_of_distributed_sampler(
    length: int, sampler_drops: bool, loader_drops: bool
) -> None:
    for rank in range(2):
        sampler = torch.utils.data.DistributedSampler(range(length), 2, rank, False, 0, sampler_drops)
        expected = DataLoader(Indexed(length), 3, sampler=sampler, drop_last=loader_drops)
        own = ResumableSampler(Indexed(length), 2, rank, False, 0, sampler_drops)
        loader = loader_of(length, 3, sampler=own, drop_last=loader_drops)
        assert [indices(batch) for batch in loader] == [indices(batch) for batch in expected]
        assert len(loader) == len(expected) and len(own) == len(sampler)


def test_amid_accumulation_the_loader_state_is_that_of_the_last_step() -> None:
    loader = loader_of(14, 1, accumulate=4)
    cursors = []
    for _ in loader:
        cursors.append(loader.state_dict()["cursor"])
    assert cursors == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 14]  # the end of an epoch ends a step
    assert loader.state_dict() == {**loader.state_dict(), "epoch": 1, "cursor": 0}

    loader = loader_of(14, 1, accumulate=4)
    assert len(list(islice(loader, 6))) == 6
    after = resumed(loader, accumulate=4)
    assert [indices(batch) for batch in islice(after, 4)] == [[4], [5], [6], [7]]
    assert after.state_dict()["cursor"] == 8
    after.set_epoch(5)
    assert after.state_dict() == {**after.state_dict(), "epoch": 5, "cursor": 0}


class Batched(Dataset):
    """Has ``__getitems__``."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 6

    def __getitems__(self, keys: list[int]) -> list[torch.Tensor]:
        self.asked.append(keys)
        return [torch.cat([torch.tensor([float(key)]), torch.rand(1)]) for key in keys]


def test_getitems_of_a_data_set_is_used_and_seeded_as_chosen() -> None:
    each, whole, none = Batched(), Batched(), Batched()
    by_sample = list(ResumableDataLoader(each, 3))
    by_batch = list(ResumableDataLoader(whole, 3, seeding="batch"))
    torch.manual_seed(0)
    assert len(list(ResumableDataLoader(none, 3, seeding="none"))) == 2
    assert each.asked == [[0], [1], [2], [0], [1], [2], [3], [4], [5]], "once more, for something was drawn"
    assert whole.asked == [[0, 1, 2], [0, 1, 2], [3, 4, 5]] and none.asked == [[0, 1, 2], [3, 4, 5]]
    other = list(ResumableDataLoader(Batched(), 2))
    assert torch.equal(torch.cat(by_sample), torch.cat(other))
    assert torch.equal(by_batch[1][0], by_sample[1][0])  # the first of a batch
    assert all(map(torch.equal, by_batch, ResumableDataLoader(Batched(), 3, seeding="batch", num_workers=1)))


SAMPLER = ResumableSampler(Indexed(3), 1, 0)
REFUSED = [
    ({"drop_last": True, "batch_size": None}, "batch_size is None"),
    ({"sampler": [0], "batch_sampler": [[0]]}, "leave shuffle and batch_sampler out"),
    ({"batch_sampler": [[0]], "batch_size": 3}, "leave batch_size"),
    ({"sharded": True}, "iterable data sets"),
    ({"num_replicas": 2, "rank": 2}, "rank is 2 of 2"),
    ({"seed": 2**63}, "seed is 9223372036854775808"),
    ({"color": "red"}, r"no argument 'color'"),
    ({"sampler": SAMPLER, "seed": 4}, "to it alone"),
    ({"batch_size": 2.5}, "batch_size is 2.5; give a whole number"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_invalid_loader_arguments_are_refused_at_once(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ResumableDataLoader(Indexed(3), **options)


class Pipe(IterDataPipe):
    def __iter__(self) -> Any:
        yield 1


class Lengthless(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


def test_data_sets_that_cannot_be_continued_are_refused() -> None:
    for dataset, options, why in (
        (Endless(3), {"shuffle": True}, "shuffle itself"),
        (Endless(3), {"sampler": [0]}, "leave sampler out"),
        (Pipe(), {}, "DataPipe"),
        (Lengthless(), {}, "Lengthless has no length"),
    ):
        with pytest.raises(ConfigError, match=why):
            ResumableDataLoader(dataset, **options)
    with pytest.raises(TypeError):
        len(ResumableDataLoader(Endless(3)))


def test_loader_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    loader = loader_of(10, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    for other, why in (
        (loader_of(11, shuffle=True), "sample 2 of 10 of epoch 0.*has 11"),
        (loader_of(10), "in order 1; here that epoch has 10 in order 0"),
        (ResumableDataLoader(Endless(10), 2), "this one is iterable"),
        (ResumableDataLoader(Remembering(10), 2), "has no world and no shards: give the kind"),
    ):
        before = other.state_dict()
        with pytest.raises(ConfigError, match=why):
            other.load_state_dict(state)
        assert other.state_dict() == before
    for harm in ({"version": 2}, {"cursor": -1}, {"epoch": 1.5}, {"seed": True}, {"length": None}):
        with pytest.raises(ConfigError):
            loader.load_state_dict({**state, **harm})
        assert loader.state_dict() == state


def test_sharded_data_resume_only_with_the_same_ranks_and_workers() -> None:
    loader = ResumableDataLoader(Remembering(9), 2, num_replicas=2, rank=0)
    common, own = loader.state_dict(), loader.rank_state_dict()
    alone = ResumableDataLoader(Remembering(9), 2, num_replicas=1, rank=0)
    with pytest.raises(ConfigError, match=r"saved with 2 ranks of 1 shards each.*now 1 of 1"):
        alone.load_state_dict(common)
    other = ResumableDataLoader(Remembering(9), 2, num_replicas=2, rank=1)
    other.load_state_dict(common)
    with pytest.raises(ConfigError, match="load_rank_state_dict"):
        next(iter(other))
    with pytest.raises(ConfigError, match=r"that of rank 0.*this is rank 1"):
        other.load_rank_state_dict(own)
    with pytest.raises(ConfigError, match="all ranks are at one position"):
        loader_of().load_rank_state_dict(own)
