"""Weights that are swapped for others while they are copied, and swapped back before that ends."""

import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import Checkpointer
from fastckpt._core.snapshot.sampled_bytes import SampledBytes
from fastckpt.errors import OverlapError
from tests.e2e.ddp.conftest import Ranks
from tests.e2e.ddp.overlapping import DEADLINE, Held, Training, in_memory, newest
from tests.e2e.ddp.overlapping import held as held
from tests.e2e.ddp.swapping import SWAPS, Way, diffusers, pointers
from tests.unit._core.format.baking import assert_same, reference


def save_while(training: Training, held: Held, swap: Iterator[None], step: int = 1) -> Any:
    """Save; all is copied while the weights are swapped. What torch.save would have written at the save."""
    swapped, copied = threading.Event(), threading.Event()
    held.holds = False
    held.on = {"overlap.copy": lambda: swapped.wait(DEADLINE), "overlap.compare": copied.set}
    wanted = reference(training.state())
    assert training.save(step).pending
    next(swap)
    swapped.set()
    assert copied.wait(DEADLINE)
    assert next(swap, "over") == "over"
    held.on = {}
    return wanted


@pytest.mark.parametrize("swap", SWAPS)
def test_a_swap_that_is_undone_loses_the_save_and_ends_overlap(ranks: Ranks, held: Held, said, swap: Way):
    training = Training(ranks).proven()
    save_while(training, held, swap(training.model))
    training.optimizer.step()
    assert newest(training.one)[0] == 0
    (warning,) = [record.message for record in said.records if "overlap with" in record.message]
    assert re.search(r"^state\['model'\]\['\d\.(weight|bias)'\] was written to", warning)  # threads compare all
    wanted = reference(training.state())
    result = training.save(2)
    assert (result.saved, result.pending, result.skipped) == (True, False, 1)
    assert "was written to while it was copied" in result.trouble
    assert_same(in_memory(training.one), (2, wanted))


def test_writes_to_other_memory_during_the_copy_lose_no_save(ranks: Ranks, held: Held, said):
    training = Training(ranks).proven()
    for step in (1, 2):
        wanted = save_while(training, held, pointers(training.model), step)
        training.optimizer.step()
        assert_same(in_memory(training.one), (step, wanted))
    assert "was written to" not in said.text


def test_a_swap_of_a_single_value_is_detected_when_everything_is_digested(ranks: Ranks, held: Held, monkeypatch):
    monkeypatch.setenv("FASTCKPT_CHECK_OVERLAP", "1")
    training = Training(ranks)

    def swap(weight: torch.Tensor, place: int) -> Iterator[None]:
        flat = weight.data.view(-1)
        before = flat[place].clone()
        flat[place] += 1
        yield
        flat[place] = before

    for step in range(1, 5):
        name, weight = random.choice(list(training.model.named_parameters()))
        save_while(training, held, swap(weight, random.randrange(weight.numel())), step)
        with pytest.raises(OverlapError, match=f"'{name}'.* changed between the save of step {step}"):
            training.one.wait_latest_checkpoint()
    assert newest(training.one) is None


class TestSamples:
    @pytest.mark.parametrize(
        "part", [lambda flat: flat[5:6], lambda flat: flat[:900_000].view(900, 1000)[:, 7]], ids=["short", "column"]
    )
    def test_each_tensor_that_is_a_view_of_a_storage_has_a_sample(self, part: Callable[[torch.Tensor], torch.Tensor]):
        flat, target = torch.zeros(1_000_000), torch.empty(1_000_000)
        tensor, storage = part(flat), flat.untyped_storage()
        for _ in range(5):
            flat.zero_()
            taken = SampledBytes([(target.data_ptr(), storage, target.nbytes)], lambda _: [tensor, flat[:0]])
            target.copy_(flat)
            assert taken.differing_source() is None and taken.differing_copy() is None
            tensor.fill_(1)
            target.copy_(flat)
            assert taken.differing_source() is not None and taken.differing_copy() is not None


@pytest.mark.parametrize("overlap", [True, False])
def test_saves_of_the_loop_overlap_unless_its_option_is_false(tmp_path: Path, overlap: bool):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    results: list[Any] = []
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=1, overlap=overlap) as checkpointer:
        checkpointer.resume()
        for step in range(1, 4):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            results.append(checkpointer.step(step))
            for _ in () if overlap else diffusers(model):
                pass
    assert [(result.saved, result.pending) for result in results] == [(True, False), (True, overlap), (True, overlap)]
    again = torch.nn.Linear(300, 300)
    with Checkpointer(tmp_path, model=again, optimizer=torch.optim.AdamW(again.parameters())) as checkpointer:
        assert checkpointer.resume() == 3
    assert_same(again.state_dict(), model.state_dict())
