"""Saves after the first reuse the unchanged structure, and notice changes."""

import enum
import pathlib
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fastckpt._core.format.plan import Planner
from fastckpt.errors import NotLoadable
from tests.unit._core.format.baking import Baker, assert_same, reference


@pytest.fixture
def baker(tmp_path: Path) -> Any:
    made = Baker(tmp_path / "model.pt")
    yield made
    made.close()


def test_a_storage_and_a_value_after_a_failed_save_are_saved(baker: Baker) -> None:
    def state(step: int) -> dict[str, Any]:
        return {"w": torch.full((3,), float(step)), "step": step, "best": None}

    baker.save(state(0))
    with pytest.raises((TypeError, AttributeError)):
        baker.save(state(1) | {"bad": (x for x in ())})
    changed = state(1) | {"extra": torch.ones(3).untyped_storage(), "best": "x" * 1000}
    baker.save(changed)
    assert bytes(torch.load(baker.path, weights_only=False)["extra"]) == bytes(changed["extra"])
    back = state(2)
    baker.save(back)
    assert_same(torch.load(baker.path), reference(back))


def test_a_shorter_save_leaves_no_bytes_of_the_one_before(baker: Baker) -> None:
    baker.save({"a": torch.ones(50_000)})
    baker.save({"a": torch.quantize_per_tensor(torch.ones(50_000), 0.1, 2, torch.quint8)})
    assert torch.load(baker.path, weights_only=False)["a"].int_repr().unique().tolist() == [12]


def test_the_slack_at_the_end_is_a_comment_to_zip_tools(baker: Baker) -> None:
    baker.save({"a": torch.ones(5)})
    with zipfile.ZipFile(baker.path) as archive:
        assert archive.namelist()[0].endswith("data.pkl")
        slack = baker.path.stat().st_size - baker.planner.plan({"a": torch.ones(5)}).skeleton.length
        assert len(archive.comment) == slack


class Colour(enum.Enum):
    RED = 1


REFUSED = {
    "Path": pathlib.PurePosixPath("/x"),
    "Enum": Colour.RED,
    "tuple": numpy.random.get_state(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_value_that_would_not_load_is_refused_with_its_key(kind: str) -> None:
    state = {"model": {"w": torch.ones(2)}, "meta": [{"args": REFUSED[kind]}]}
    with pytest.raises(NotLoadable, match=r"state\['meta'\]\[0\]\['args'\].* is a .*weights_only=False"):
        Planner().plan(state)
    assert Planner(weights_only=False).plan(state).skeleton.length > 0
