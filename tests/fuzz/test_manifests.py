"""Arbitrary files in place of manifests and of a slot's records: what was written, or a refusal."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.format.ids import LARGEST, SaveId
from fastckpt._core.format.manifest import MODEL, FileEntry, Manifest, _digest
from fastckpt._core.memory import slots
from fastckpt._core.memory.slots import SlotBegin, SlotDone
from fastckpt.errors import BadCheckpoint
from tests.fuzz.mutations import DEPTHS, PIECES, mutated, mutations

DIGEST = "0123456789abcdef" * 2
GOOD = [
    Manifest(SaveId(1, 7), None, (FileEntry(MODEL, 1000, DIGEST),), 2, 1e9, {"metrics": {"loss": 0.5}, "n": [1, None]}),
    Manifest(SaveId(2, 0), SaveId(1, 7), (FileEntry(MODEL, 9, DIGEST),), 1, 0.0, {}, "models/m.pt"),
]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(["..", "a/../b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def check(text: str | bytes) -> None:
    """It is refused, or it is a manifest that can be written and read again and names no file elsewhere."""
    try:
        found = Manifest.from_json(text)
    except BadCheckpoint:
        return
    assert Manifest.from_json(found.to_json()) == found
    assert 0 <= found.id.history <= LARGEST and 0 <= found.id.step <= LARGEST
    for entry in found.files:
        assert Path("/root", entry.name).resolve().is_relative_to("/root")


def signed(body: dict) -> str:
    """As somebody would write it who knows how to compute the digest."""
    body.pop("digest", None)
    return json.dumps({**body, "digest": _digest(body)})


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(GOOD), mutations([*PIECES, b"../"]))
def test_manifests_with_damaged_bytes_are_refused_or_equal(manifest, changes):
    check(mutated(manifest.to_json().encode(), changes))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(GOOD), st.data())
def test_manifests_with_invalid_values_and_right_digests_are_refused(manifest, data):
    body = json.loads(manifest.to_json())
    part = data.draw(st.sampled_from([body, body["files"][0], body["id"], body["details"]]))
    name = data.draw(st.sampled_from([*part, "surplus"]))
    part[name] = data.draw(values)
    try:
        text = signed(body)
    except BadCheckpoint:
        return  # it is no JSON
    check(text)


@pytest.fixture(scope="module")
def slot(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """A slot with a checkpoint, and its records."""
    slot = tmp_path_factory.mktemp("arena") / "slot-0"
    slot.mkdir()
    slots.begin(slot, SlotBegin(SaveId(1, 7), frozenset({0})))
    slots.commit(slot, 0, SlotDone(SaveId(1, 7), {MODEL: 5}, {"metrics": {"loss": 0.5}}))
    good = {name: json.dumps(json.loads((slot / name).read_text())).encode() for name in (".begin", ".done-0")}
    return slot, good


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([".begin", ".done-0"]), mutations(PIECES))
def test_a_slot_whose_records_are_damaged_holds_a_checkpoint_or_none(slot, name, changes):
    place, good = slot
    for each, text in good.items():
        (place / each).write_bytes(mutated(text, changes) if each == name else text)
    found = slots.read(place)
    if found.committed:
        assert all(type(size) is int for size in found.files.values()) and isinstance(found.details, dict)


def test_times_beyond_all_clocks_are_refused():
    """An integer of 400 digits is no float."""
    for time in (10**400, LARGEST + 1, -1):
        with pytest.raises(BadCheckpoint, match="seconds since the epoch"):
            Manifest.from_json(signed(json.loads(GOOD[0].to_json()) | {"time": time}))


def test_manifests_with_deep_values_are_read_or_refused():
    for depth in DEPTHS:
        deep: list = []
        for _ in range(min(depth, 900)):
            deep = [deep]
        for field in ("time", "details", "files"):
            body = json.loads(GOOD[0].to_json())
            check(json.dumps(body | {field: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth))
            with suppress(BadCheckpoint):
                check(signed(body | {field: deep}))
