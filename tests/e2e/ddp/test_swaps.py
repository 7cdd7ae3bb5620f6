"""Weights that are swapped for others while they are copied, and swapped back before that ends.

Ways to swap are generators that stop where an evaluation would be. Of diffusers there are the lines that write.
"""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fastckpt import Checkpointer
from fastckpt._core.snapshot.sampled_bytes import SampledBytes
from fastckpt.errors import OverlapError
from tests.e2e.ddp.overlapping import DEADLINE, Held, Training, assert_lost, in_memory, newest
from tests.e2e.ddp.overlapping import held as held
from tests.unit._core.format.baking import assert_same, reference

pytestmark = pytest.mark.usefixtures("held")


def averages(model: nn.Module) -> list[torch.Tensor]:
    return [torch.full_like(each, 0.25, requires_grad=False) for each in model.parameters()]


def diffusers(model: nn.Module) -> Iterator[None]:
    """EMAModel's store, copy_to and restore."""
    stored = [each.detach().cpu().clone() for each in model.parameters()]
    for average, each in zip(averages(model), model.parameters(), strict=True):
        each.data.copy_(average.to(each.device).data)
    yield
    for kept, each in zip(stored, model.parameters(), strict=True):
        each.data.copy_(kept.data)


def state_dicts(model: nn.Module) -> Iterator[None]:
    """torch's AveragedModel, by state dicts: torch counts these writes, and none of those above."""
    average, kept = AveragedModel(model), {name: each.clone() for name, each in model.state_dict().items()}
    for each in average.parameters():
        each.data.fill_(0.25)
    model.load_state_dict(average.module.state_dict())
    yield
    model.load_state_dict(kept)


def pointers(model: nn.Module) -> Iterator[None]:
    kept = [each.data for each in model.parameters()]
    for each, average in zip(model.parameters(), averages(model), strict=True):
        each.data = average
    yield
    for each, old in zip(model.parameters(), kept, strict=True):
        each.data = old


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


@pytest.mark.parametrize("swap", [diffusers, state_dicts])
def test_a_swap_that_is_undone_loses_the_save_and_ends_overlap(ranks, held, said, swap):
    training = Training(ranks).proven()
    save_while(training, held, swap(training.model))
    training.optimizer.step()
    how = r"^state\['model'\]\['\d\.(weight|bias)'\] was written to"  # threads compare all
    assert_lost(training, said, how, "was written to while it was copied")


@pytest.mark.campaign
def test_of_1000_swaps_at_any_instant_no_save_with_swapped_weights_counts(ranks, held):
    held.holds = False
    training = Training(ranks, model=nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))).proven()
    wanted, overlap, lost = reference(training.state()), training.one._writer.overlap, 0
    kept = [each.detach().clone() for each in training.model.parameters()]
    for step in range(1, 1001):
        overlap.defer([training.optimizer])  # as if the last swap had not ended overlap
        assert training.save(step).pending
        for weights in (averages(training.model), kept):
            time.sleep(random.random() ** 2 * 0.02)
            for each, source in zip(training.model.parameters(), weights, strict=True):
                each.data.copy_(source)
        overlap.wait()
        _, outcome = overlap._endings.pop()
        lost += bool(outcome.skipped)
        if not outcome.skipped:
            assert_same(in_memory(training.one), (step, wanted))
    assert lost > 100


def test_writes_to_other_memory_during_the_copy_lose_no_save(ranks, held, said):
    training = Training(ranks).proven()
    for step in (1, 2):
        wanted = save_while(training, held, pointers(training.model), step)
        training.optimizer.step()
        assert_same(in_memory(training.one), (step, wanted))
    assert "was written to" not in said.text


def test_a_swap_of_a_single_value_is_detected_when_everything_is_digested(ranks, held, monkeypatch):
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


@pytest.mark.parametrize(
    "part", [lambda flat: flat[5:6], lambda flat: flat[:900_000].view(900, 1000)[:, 7]], ids=["short", "column"]
)
def test_each_tensor_that_is_a_view_of_a_storage_has_a_sample(part):
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
def test_saves_of_the_loop_overlap_unless_its_option_is_false(tmp_path, held, overlap):
    held.holds = False
    model = nn.Linear(300, 300)
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
    again = nn.Linear(300, 300)
    with Checkpointer(tmp_path, model=again, optimizer=torch.optim.AdamW(again.parameters())) as checkpointer:
        assert checkpointer.resume() == 3
    assert_same(again.state_dict(), model.state_dict())
