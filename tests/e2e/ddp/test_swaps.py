"""Weights that are swapped for others while they are copied, and swapped back before that ends."""

import ctypes
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import Checkpointer, StorageType
from fastckpt._core.snapshot import mutation_check, sampled_bytes
from fastckpt._core.snapshot.sampled_bytes import SampledBytes, SampledDeviceBytes
from fastckpt.errors import ConfigError, OverlapError
from tests.e2e.ddp.conftest import Ranks
from tests.e2e.ddp.overlapping import DEADLINE, Held, in_memory, net, newest, proven
from tests.e2e.ddp.swapping import COUNTED, HARMLESS, UNCOUNTED, diffusers
from tests.unit._core.format.baking import assert_same, reference


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(mutation_check, "WORTH", 1)
    with Held() as held:
        held.holds = False
        yield held


class Training:
    """A checkpointer whose saves overlap from now on."""

    def __init__(self, ranks: Ranks) -> None:
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.one = ranks.start(overlap=self.optimizer)[0]

    def proven(self) -> "Training":
        proven(self.one, self.optimizer, self.state)
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save_while(self, held: Held, swap: Iterator[None], step: int = 1) -> Any:
        """Save; all is copied while the weights are swapped. What torch.save would have written at the save."""
        swapped, copied = threading.Event(), threading.Event()
        held.on = {"overlap.copy": lambda: swapped.wait(DEADLINE), "overlap.compare": copied.set}
        wanted = reference(self.state())
        assert self.one.save_checkpoint(step, self.state(), storage_type=StorageType.MEMORY).pending
        next(swap)
        swapped.set()
        assert copied.wait(DEADLINE)
        assert next(swap, "over") == "over"
        held.on = {}
        return wanted


@pytest.mark.parametrize("name", UNCOUNTED | COUNTED)
def test_a_swap_that_is_undone_loses_the_save_and_ends_overlap(
    ranks: Ranks, held: Held, said: pytest.LogCaptureFixture, name: str
):
    training = Training(ranks).proven()
    training.save_while(held, (UNCOUNTED | COUNTED)[name](training.model))
    training.optimizer.step()
    assert newest(training.one)[0] == 0
    warnings = [record.message for record in said.records if "overlap with" in record.message]
    first = r"^state\['model'\]\['\d\.(weight|bias)'\] was written to"  # all were, and threads compare them
    assert len(warnings) == 1 and re.search(first, warnings[0])
    wanted = reference(training.state())
    result = training.one.save_checkpoint(2, training.state(), storage_type=StorageType.MEMORY)
    assert (result.saved, result.pending, result.skipped) == (True, False, 1)
    assert "was written to while it was copied" in result.trouble
    assert_same(in_memory(training.one), (2, wanted))


@pytest.mark.parametrize("name", HARMLESS)
def test_writes_to_other_memory_during_the_copy_lose_no_save(
    ranks: Ranks, held: Held, said: pytest.LogCaptureFixture, name: str
):
    training = Training(ranks).proven()
    for step in (1, 2):
        wanted = training.save_while(held, HARMLESS[name](training.model), step)
        training.optimizer.step()
        assert_same(in_memory(training.one), (step, wanted))
    assert "was written to" not in said.text


def test_a_swap_of_a_single_value_is_detected_when_everything_is_digested(
    ranks: Ranks, held: Held, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTCKPT_CHECK_OVERLAP", "1")
    training = Training(ranks)

    def swap(weight: torch.Tensor, place: int) -> Iterator[None]:
        flat = weight.data.view(-1)
        before = flat[place].clone()
        flat[place] += 1
        yield
        flat[place] = before

    for step in range(1, 9):
        name, weight = random.choice(list(training.model.named_parameters()))
        training.save_while(held, swap(weight, random.randrange(weight.numel())), step)
        with pytest.raises(OverlapError, match=f"'{name}'.* changed between the save of step {step}"):
            training.one.wait_latest_checkpoint()
    assert newest(training.one) is None


class TestAtAnyTime:
    """Swaps that begin and end wherever the copy is; benchmarks/swaps.py makes a thousand."""

    def test_a_save_with_swaps_at_any_time_is_never_committed_torn(self, ranks: Ranks):
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        one = ranks.start(overlap=optimizer)[0]

        def state() -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        proven(one, optimizer, state)
        for step in range(1, 31):
            one._writer.overlap.defer([optimizer])  # as if it had not been turned off
            wanted = reference(state())
            assert one.save_checkpoint(step, state(), storage_type=StorageType.MEMORY).pending
            time.sleep(random.random() * 0.02)
            for _ in diffusers(model):
                pass
            one._writer.overlap.wait()
            found, got = in_memory(one)
            if found == step:
                assert_same(got, wanted)


def copies_of(*tensors: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
    """What is to be copied, and to where."""
    targets = [torch.empty(each.untyped_storage().nbytes(), dtype=torch.uint8) for each in tensors]
    found = [
        (target.data_ptr(), each.untyped_storage(), target.nbytes)
        for each, target in zip(tensors, targets, strict=True)
    ]
    return found, targets


def copy(copies: list[Any], targets: list[torch.Tensor]) -> None:
    for (_, storage, _), target in zip(copies, targets, strict=True):
        target.untyped_storage().copy_(storage)


class TestSamples:
    @pytest.mark.parametrize("size", [1, 63, 64, 65, 1 << 20, (1 << 20) + 1, (3 << 20) + 100])
    def test_each_mebibyte_of_a_tensor_has_one_sample_within_its_bounds(self, size: int):
        tensor = torch.zeros(size, dtype=torch.uint8)
        for _ in range(20):
            places = sampled_bytes._places(tensor.data_ptr(), size, [tensor])
            assert [place >> 20 for place in places] == list(range(-(-size >> 20)))
            assert all(place % 64 == 0 and place < size for place in places)

    def test_samples_reach_every_place_of_a_tensor_eventually(self):
        tensor = torch.zeros(1000, dtype=torch.uint8)
        drawn = {sampled_bytes._places(0, 1000, [tensor])[0] for _ in range(1000)}
        assert drawn == set(range(0, 1000, 64))

    @pytest.mark.parametrize(
        "part",
        [
            lambda flat: flat[5:6],
            lambda flat: flat[700_000:],
            lambda flat: flat[:900_000].view(900, 1000)[:, 7],
            lambda flat: flat.view(1000, 1000).t(),
            lambda flat: flat[3],
        ],
        ids=["short", "last", "column", "turned", "scalar"],
    )
    def test_each_tensor_that_is_a_view_of_a_storage_has_a_sample(self, part: Callable[[torch.Tensor], torch.Tensor]):
        flat = torch.zeros(1_000_000)
        tensor = part(flat)
        copies, targets = copies_of(flat)
        for _ in range(20):
            flat.zero_()
            taken = SampledBytes(copies, lambda _: [tensor, flat[:0]])
            copy(copies, targets)
            assert taken.differing_source() is None and taken.differing_copy() is None
            tensor.fill_(1)
            copy(copies, targets)
            assert taken.differing_source() is not None and taken.differing_copy() is not None

    def test_a_swap_seen_around_the_copy_of_a_chunk_is_detected_after_its_undoing(self):
        tensor = torch.zeros(3 << 20, dtype=torch.uint8)
        copies, targets = copies_of(tensor)
        start, mebibyte = tensor.data_ptr(), 1 << 20
        taken = SampledBytes(copies, lambda _: [tensor])
        tensor[mebibyte : 2 * mebibyte] = 1
        taken.compare((targets[0].data_ptr(), start, mebibyte), False)
        tensor.zero_()
        assert taken.differing_source() is None
        tensor[mebibyte : 2 * mebibyte] = 1
        taken.compare((targets[0].data_ptr() + mebibyte, start + mebibyte, mebibyte), False)
        tensor.zero_()
        assert taken.differing_source() is not None

    @pytest.mark.parametrize("written", [slice(0, 100), slice(-100, None), slice((1 << 20) + 5)])
    def test_a_write_of_a_tensor_that_has_only_begun_or_nearly_ended_is_detected(self, written: slice):
        """Slower than the copy, it is at none of the random places when each chunk is compared."""
        tensor = torch.zeros(3 << 20, dtype=torch.uint8)
        copies, targets = copies_of(tensor)
        start, mebibyte = tensor.data_ptr(), 1 << 20
        taken = SampledBytes(copies, lambda _: [tensor])
        tensor[written] = 1
        copy(copies, targets)
        taken.compare((targets[0].data_ptr() + mebibyte, start + mebibyte, mebibyte), True)
        tensor.zero_()
        assert taken.differing_source() is not None

    def test_a_write_that_begins_and_ends_during_the_copy_of_a_chunk_is_detected(self):
        tensor = torch.zeros(3 << 20, dtype=torch.uint8)
        copies, targets = copies_of(tensor)
        copy(copies, targets)
        taken = SampledBytes(copies, lambda _: [tensor])
        piece = targets[0].data_ptr(), tensor.data_ptr(), tensor.nbytes
        taken.compare(piece, True)
        assert taken.differing_source() is None
        targets[0][random.randrange(tensor.nbytes)] = 1
        taken.compare(piece, False)
        assert taken.differing_source() is None
        taken.compare(piece, True)
        assert taken.differing_source() is not None

    @pytest.mark.parametrize("size", [1, 65, 4096, (5 << 20) + 64, (5 << 20) + 3])
    def test_samples_of_a_device_take_few_operations(self, size: int):
        tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8), torch.arange(7)]
        copies, targets = copies_of(*tensors)
        by_storage = {each.untyped_storage().data_ptr(): [each] for each in tensors}
        for _ in range(5):
            taken = SampledDeviceBytes(copies, lambda storage: by_storage[storage.data_ptr()])
            copy(copies, targets)
            ctypes.memmove(taken.piece.target, taken.piece.source.data_ptr(), taken.piece.source.nbytes)
            assert taken.differing_copy() is None
            targets[0].add_(1)
            assert taken.differing_copy() is not None
            copy(copies, targets)
            targets[1].add_(1)
            assert taken.differing_copy() is not None

    def test_sampling_neither_changes_the_random_numbers_of_training_nor_follows_its_seeds(self):
        tensor = torch.zeros(1 << 20, dtype=torch.uint8)
        places = []
        for _ in range(4):
            random.seed(1)
            before = random.getstate(), torch.get_rng_state()
            places.append(sampled_bytes._places(0, 1 << 20, [tensor])[0])
            assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
        assert len(set(places)) > 1


class TestOption:
    """`overlap` of Checkpointer."""

    @pytest.mark.parametrize("overlap", [True, False])
    def test_saves_overlap_unless_overlap_is_false(self, tmp_path: Path, overlap: bool):
        model = torch.nn.Linear(300, 300)
        optimizer = torch.optim.AdamW(model.parameters())
        results = []
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=1, overlap=overlap) as checkpointer:
            checkpointer.resume()
            for step in range(1, 4):
                model(torch.ones(2, 300)).sum().backward()
                optimizer.step()
                results.append(checkpointer.step(step))
                for _ in () if overlap else diffusers(model):
                    pass
        assert all(result is not None and result.saved for result in results)
        assert [result.pending for result in results if result is not None] == [False, overlap, overlap]
        again = torch.nn.Linear(300, 300)
        with Checkpointer(tmp_path, model=again, optimizer=torch.optim.AdamW(again.parameters())) as checkpointer:
            assert checkpointer.resume() == 3
        assert_same(again.state_dict(), model.state_dict())

    @pytest.mark.parametrize("given", [None, (), "no", torch.optim.SGD([torch.ones(1, requires_grad=True)])])
    def test_a_value_of_the_overlap_option_that_is_no_bool_is_refused(self, tmp_path: Path, given: Any):
        with pytest.raises(ConfigError, match=r"overlap is .+; give True or False"):
            Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), overlap=given)
