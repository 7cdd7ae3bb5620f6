"""Gradients are bitwise those without offloading, for models and steps of many kinds, within the budget."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from fastckpt.offload import ActivationOffload
from tests.e2e.offload.models import CASES, gradients


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_bitwise_within_budget(name: str, offload: ActivationOffload) -> None:
    """In the first step, which is profiled, and in the next one, which has a plan."""
    case = CASES[name]
    torch.manual_seed(7)
    model = case.make()
    for step in range(2):
        want = gradients(case, model, nullcontext, step)
        found = gradients(case, model, lambda: offload, step)
        assert want and len(want) == len(found)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want, strict=True)), step
    report = offload.report()
    assert report.written > report.budget, report
    sizes = [size for known in offload._offloader._known._steps for size in known.sizes]
    assert report.peak <= report.budget + max(sizes), report
    assert report.wrote.planned is not None, "later steps had a plan"
    assert not report.failure


@pytest.mark.parametrize(
    ("name", "consistency"), [*((name, "check") for name in CASES), ("complex, tied, expanded", "copy")]
)
def test_gradients_are_bitwise_those_without_offloading(tmp_path, name, consistency):
    offload = ActivationOffload(tmp_path, budget=CASES[name].budget, consistency=consistency)
    assert_bitwise_within_budget(name, offload)
