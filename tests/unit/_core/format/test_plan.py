"""Saves after the first reuse the unchanged structure, and notice changes."""

import argparse
import datetime
import enum
import pathlib
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.format.plan import Planner
from fastckpt._core.format.skeleton import MAX_COMMENT
from fastckpt.errors import NotLoadable
from tests.unit._core.format.baking import Baker, assert_same, reference


@pytest.fixture
def baker(tmp_path: Path) -> Any:
    made = Baker(tmp_path / "model.pt")
    yield made
    made.close()


def training() -> tuple[Callable[[int], dict[str, Any]], torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state(step: int) -> dict[str, Any]:
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "best": None}

    return state, model, optimizer


def test_later_saves_reuse_the_skeleton_and_the_file(baker: Baker) -> None:
    state, _, _ = training()
    skeletons = set()
    for step in range(5):
        current = state(step)
        baker.save(current)
        skeletons.add(baker.planner.plan(current).skeleton)
        assert_same(torch.load(baker.path), reference(current))
    assert len(skeletons) == 1
    assert baker.files == 1


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a new tensor": lambda s: s["model"].update(extra=torch.ones(3)),
    "another shape": lambda s: s["model"].update({"0.weight": torch.ones(9, 5)}),
    "another dtype": lambda s: s["model"].update({"0.weight": s["model"]["0.weight"].double()}),
    "a shared storage": lambda s: s["model"].update(extra=s["model"]["0.weight"]),
    "a view": lambda s: s["model"].update(extra=s["model"]["0.weight"][1:, 2:]),
    "no longer contiguous": lambda s: s["model"].update({"0.weight": s["model"]["0.weight"].t()}),
    "zero size": lambda s: s["model"].update({"0.weight": torch.empty(0, 5)}),
    "complex": lambda s: s.update(extra=torch.randn(3, dtype=torch.complex64)),
    "bf16": lambda s: s.update(extra=torch.randn(3).bfloat16()),
    "bool": lambda s: s.update(extra=torch.ones(3, dtype=torch.bool)),
    "deeper": lambda s: s.update(extra={"a": [{"b": (torch.ones(2), [1, 2.5, "x"])}]}),
    "an int that became a float": lambda s: s.update(step=3.0),
    "a bool that became an int": lambda s: s.update(best=1),
    "a text": lambda s: s.update(best="x" * 1000),
    "a long text": lambda s: s.update(best="x" * (MAX_COMMENT + 5)),
    "a very large int": lambda s: s.update(step=10**40),
    "a key of another type": lambda s: s["optimizer"]["state"].update({True: {}}),
    "another order of keys": lambda s: s.update(model=OrderedDict(reversed(s["model"].items()))),
    "gone": lambda s: s["model"].pop("0.weight"),
    "sparse": lambda s: s.update(extra=torch.eye(3).to_sparse()),
    "nested tensor": lambda s: s.update(extra=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "quantized": lambda s: s.update(extra=torch.quantize_per_tensor(torch.randn(4), 0.1, 2, torch.quint8)),
    "a tensor with an attribute": lambda s: setattr(s["model"]["0.weight"], "tag", "mine"),
    "a tensor with attributes": lambda s: vars(s["model"]["0.weight"]).update(tag=[1], other=None),
    "a subclass": lambda s: s.update(extra=torch.nn.Buffer(torch.ones(2))),
    "a storage": lambda s: s.update(extra=torch.ones(3).untyped_storage()),
    "a list in itself": lambda s: s.update(extra=(loop := [1]) and (loop.append(loop) or None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_structure_that_changes_is_saved_correctly(baker: Baker, change: str) -> None:
    state, _, _ = training()
    baker.save(state(0))
    changed = state(1)
    CHANGES[change](changed)
    baker.save(changed)
    if change != "a storage":
        assert_same(torch.load(baker.path, weights_only=False), reference(changed))
    else:
        assert bytes(torch.load(baker.path, weights_only=False)["extra"]) == bytes(changed["extra"])
    back = state(2)
    baker.save(back)
    assert_same(torch.load(baker.path), reference(back))


def test_marks_of_a_compiler_are_kept_and_need_no_pickler(baker: Baker) -> None:
    tensor = torch.ones(3)
    skeletons = []
    for mark in ("guarded", "guarded", "unguarded", None, True):
        tensor.mark = mark  # type: ignore[attr-defined]
        baker.save({"a": tensor.add_(1)})
        skeletons.append(baker.planner.plan({"a": tensor}).skeleton)
        assert_same(torch.load(baker.path), reference({"a": tensor}))
    assert skeletons[0] is skeletons[1] and len(set(skeletons)) == 4
    del tensor.mark
    baker.save({"a": tensor})
    assert not vars(torch.load(baker.path)["a"])


def test_a_frozen_parameter_without_optimizer_state_is_saved(baker: Baker) -> None:
    state, model, _ = training()
    next(model.parameters()).requires_grad_(False)
    for step in range(2):
        current = state(step)
        baker.save(current)
        assert_same(torch.load(baker.path), reference(current))


def test_a_shorter_save_leaves_no_bytes_of_the_one_before(baker: Baker) -> None:
    baker.save({"a": torch.ones(50_000)})
    baker.save({"a": torch.quantize_per_tensor(torch.ones(50_000), 0.1, 2, torch.quint8)})
    assert torch.load(baker.path, weights_only=False)["a"].int_repr().unique().tolist() == [12]


def test_the_slack_at_the_end_is_a_comment_to_zip_tools(baker: Baker) -> None:
    baker.save({"a": torch.ones(5)})
    with zipfile.ZipFile(baker.path) as archive:
        assert archive.namelist()[0].endswith("data.pkl")
        assert (
            len(archive.comment) == baker.path.stat().st_size - baker.planner.plan({"a": torch.ones(5)}).skeleton.length
        )


class Colour(enum.Enum):
    RED = 1


REFUSED = {
    "Path": pathlib.PurePosixPath("/x"),
    "datetime": datetime.datetime(2020, 1, 1),
    "Enum": Colour.RED,
    "defaultdict": defaultdict(list),
    "Namespace": argparse.Namespace(a=1),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_value_that_would_not_load_is_refused_with_its_key(kind: str) -> None:
    state = {"model": {"w": torch.ones(2)}, "meta": [{"args": REFUSED[kind]}]}
    with pytest.raises(NotLoadable, match=r"state\['meta'\]\[0\]\['args'\] is a .*weights_only=False"):
        Planner().plan(state)
    assert Planner(weights_only=False).plan(state).skeleton.length > 0


def test_a_numpy_random_state_is_refused_with_its_key() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(NotLoadable, match=r"state\['rng'\]"):
        Planner().plan({"w": torch.ones(2), "rng": numpy.random.get_state()})


def test_a_save_after_a_failed_one_is_correct(baker: Baker) -> None:
    state, _, _ = training()
    baker.save(state(0))
    with pytest.raises((TypeError, AttributeError)):
        baker.save(state(1) | {"bad": (x for x in ())})
    current = state(2)
    baker.save(current)
    assert_same(torch.load(baker.path), reference(current))
