"""Gradients are bitwise those without offloading, for models and steps of many kinds, within the budget."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from fastckpt._core.byte_sizes import parsed
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.models import CASES, gradients

STEPS = 3
COPIED = ("dropout", "retain_graph", "complex, tied, expanded")


@pytest.fixture
def threads(name: str, consistency: str) -> Iterator[None]:
    """Operators have one thread in tests; in one case two, besides those that offload."""
    usual = torch.get_num_threads()
    torch.set_num_threads(2 if (name, consistency) == ("dropout", "copy") else usual)
    yield
    torch.set_num_threads(usual)


@pytest.mark.parametrize(
    ("name", "consistency"), [*((name, "check") for name in CASES), *((name, "copy") for name in COPIED)]
)
def test_gradients_are_bitwise_those_without_offloading(tmp_path, name, consistency, threads):
    """In the first step, which is profiled, and in later ones, which have a plan."""
    case = CASES[name]
    torch.manual_seed(7)
    model = case.make()
    offload = ActivationOffload(tmp_path, budget=case.budget, consistency=consistency)
    for step in range(STEPS):
        want = gradients(case, model, nullcontext, step)
        found = gradients(case, model, lambda: offload, step)
        assert want and len(want) == len(found)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want, strict=True)), step
    report = offload.report()
    assert report.written > parsed(case.budget), report
    sizes = [size for known in offload._offloader._known._steps for size in known.sizes]
    assert report.peak <= parsed(case.budget) + max(sizes), report
    assert report.wrote.planned is not None, "later steps had a plan"
    assert not report.failure
