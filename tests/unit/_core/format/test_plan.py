"""Saves after the first reuse the unchanged structure, and notice changes; many numbers are pickled as one piece."""

import collections
import enum
import logging
import math
import pathlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch

from fastckpt._core.format import plan
from fastckpt._core.format.number_lists import MANY
from fastckpt._core.format.plan import Planner
from fastckpt._core.replicas.state_digest import digest_of
from fastckpt.errors import NotLoadable
from tests.unit._core.format.baking import Baker


@pytest.fixture
def baker(tmp_path: Path) -> Iterator[Baker]:
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
    baker.check(back)


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


REFUSED = (pathlib.PurePosixPath("/x"), Colour.RED, numpy.random.get_state())


def test_a_value_that_would_not_load_is_refused_with_its_key() -> None:
    for value in REFUSED:
        state = {"model": {"w": torch.ones(2)}, "meta": [{"args": value}]}
        with pytest.raises(NotLoadable, match=r"state\['meta'\]\[0\]\['args'\].* is a .*weights_only=False"):
            Planner().plan(state)
        assert Planner(weights_only=False).plan(state).skeleton.length > 0


# --- containers of many numbers


FLOATS = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, *(i * 0.1 for i in range(2 * MANY))]
INTS = [0, -1, 255, 256, 65536, -(1 << 31), (1 << 63) - 1, 1 << 70, *range(2 * MANY)]
KINDS: dict[str, Any] = {
    "floats": FLOATS,
    "ints": INTS,
    "mixed": [each for pair in zip(FLOATS, INTS, strict=False) for each in pair] + [True, False],
    "a tuple": tuple(FLOATS),
    "by numbers": dict(enumerate(FLOATS)),
    "by texts": {f"step {i}": each for i, each in enumerate(FLOATS)},
    "by tuples": {(i,): each for i, each in enumerate(FLOATS)},
}


def with_numbers(numbers: Any) -> dict[str, Any]:
    """A state in which the numbers stand twice, between tensors and single numbers."""
    return {"weight": torch.arange(4.0), "step": 7, "history": {"one": numbers, "other": [numbers, 0.5]}, "lr": 0.1}


@pytest.mark.parametrize("more", [{}, {"window": collections.deque([1.0, 2.0]), "ints": INTS}], ids=["", "an object"])
def test_many_numbers_load_bit_for_bit_from_each_save(baker: Baker, more: dict[str, Any]) -> None:
    for kind in KINDS.values():
        baker.check(with_numbers(kind) | more)
        files = baker.files
        for step in (8, 9):
            baker.check(with_numbers(kind) | {"step": step} | more)
        assert baker.files == files


def test_a_list_that_grows_and_changes_in_place_is_saved(baker: Baker) -> None:
    saved = with_numbers([0.5] * (MANY - 3))
    for step in range(8):
        saved["history"]["one"].append(step * 0.1)
        saved["history"]["one"][step] = -0.0 if step % 2 else 0.0
        baker.check(saved)
    for each in (1.5, "text", "text", 3.5, [1], 4.5, 5, torch.ones(2), 7.5):
        saved["history"]["one"][3] = each
        baker.check(saved)


def test_many_numbers_of_ranks_are_compared_as_one() -> None:
    assert digest_of([*FLOATS]) == digest_of([*FLOATS]) != digest_of([*FLOATS[:-1], 1.0])
    assert digest_of([*INTS]) != digest_of([*map(float, INTS[:7]), *INTS[7:]])


@pytest.mark.parametrize("is_opaque", [False, True])
def test_a_save_calls_no_function_for_each_of_many_numbers(baker: Baker, is_opaque: bool) -> None:
    saved = with_numbers([*FLOATS]) | ({"window": collections.deque([1])} if is_opaque else {})
    baker.save(saved)
    saved["history"]["one"] += [0.1] * 100
    assert calls(lambda: baker.save(saved)) < MANY, "structure changed"
    baker.save(saved)
    saved["history"]["one"][5] = 3.0
    assert calls(lambda: baker.save(saved)) < MANY, "structure known"


def test_many_numbers_in_small_containers_are_named_once(
    baker: Baker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("fastckpt"), "propagate", True)
    monkeypatch.setattr(plan, "WARNED", 4000)
    saved = with_numbers(FLOATS)
    saved["log"] = {"rows": [{"step": i, "loss": 0.5} for i in range(2000)], "best": [0.5] * MANY}
    for _ in range(3):
        baker.save(saved)
        saved["log"]["rows"].append({"step": 0, "loss": 0.5})
    [line] = caplog.messages
    assert line.startswith("state['log']['rows'] has most of 400")
    assert "Keep one long list" in line


def calls(run: Any) -> int:
    """How many Python functions of this thread are called."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
