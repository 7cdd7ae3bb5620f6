"""Ids and manifests: written ones are read, and nothing else is."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from fastckpt._core.format import manifest as module
from fastckpt._core.format.ids import LARGEST, SaveId
from fastckpt._core.format.manifest import FileEntry, Manifest
from fastckpt.errors import BadCheckpoint, ProtocolError
from tests.support.tables import for_each

DIGEST = "0123456789abcdef" * 2
MODEL = FileEntry("model.pt", 10, DIGEST)
PLAIN = Manifest(SaveId(2, 7), SaveId(1, 5), (MODEL, FileEntry("rank_0.pt", 0, DIGEST)), 2, 1.5, {"a": [1, None]})

STRANGE = FileEntry("ä b/\n/x.pt", LARGEST, DIGEST[::-1])
VALUES = {"": [], "text": "\ud83d\0", "numbers": [1e-320, -0.0, 1.5, 2**70, -1, True], "deep": {"a": [{"b": None}]}}
WRITTEN = [
    PLAIN,
    *(replace(PLAIN, target=target) for target in ("/data/ckpt.pt", "ckpt.pt", "sub/ckpt.pt")),
    Manifest(SaveId(0, LARGEST), None, (), LARGEST, 0.0, {}),
    Manifest(SaveId(LARGEST, 0), SaveId(0, 0), (STRANGE,), 1, 1e12 / 3, VALUES),
]


BAD_IDS = [None, 7, "7", [2, 7], {}, {"history": 0}, {"history": 0, "step": -1}, {"history": True, "step": 1}]
BAD_IDS += [{"history": 0, "step": step} for step in (1.0, "1", None, LARGEST + 1)]


def test_save_ids_are_ordered_by_history_first_and_invalid_ones_refused():
    assert SaveId(0, 100) < SaveId(1, 50) < SaveId(1, 51)
    assert str(SaveId(2, 7)) == "step 7 of history 2"
    for value in (*BAD_IDS, {"history": 0, "step": 1, "more": 1}):
        with pytest.raises(ProtocolError):
            SaveId.from_json(value)


@for_each(*WRITTEN)
def test_manifests_survive_a_round_trip_as_json(manifest: Manifest):
    assert Manifest.from_json(manifest.to_json()) == Manifest.from_json(manifest.to_json().encode()) == manifest


def test_a_flipped_bit_in_a_manifest_is_found_or_changes_nothing():
    text = PLAIN.to_json().encode()
    for bit in range(len(text) * 8):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        with suppress(BadCheckpoint):
            assert Manifest.from_json(bytes(flipped)) == PLAIN  # say a blank that became a line's end


def forged(**changes):
    """A manifest's text with a right digest over wrong contents."""
    body = {**json.loads(PLAIN.to_json()), **changes}
    body.pop("digest")
    body = {key: value for key, value in body.items() if value is not ...}
    return json.dumps({**body, "digest": module._digest(body)})


def with_file(**changes):
    return {"files": [{"name": "model.pt", "size": 1, "digest": DIGEST, **changes}]}


BAD_NAMES = ["/etc/passwd", "../model.pt", "a/../../model.pt", "", "a//b", ".", "a\0b", "\ud800", 7, "manifest.json"]
BAD_TARGETS = [None, "../ckpt.pt", "/data/../etc/passwd", "/", "../", "/etc/", ".fastckpt/"]


@for_each(
    ({"fastckpt": 0}, "schema is '0'"),
    ({"fastckpt": None}, "schema"),
    ({"id": None}, "save id"),
    ({"id": {"history": 0, "step": -1}}, "step is '-1'"),
    ({"parent": 5}, "save id"),
    ({"world_size": 0}, "world size is '0'"),
    ({"time": -1.0}, "time is '-1.0'"),
    ({"details": []}, "details"),
    ({"files": None}, "NoneType"),
    ({"files": [5]}, "a file is '5'"),
    ({"files": [{"name": "model.pt"}]}, "size"),
    (with_file(size=-1), "size of model.pt is '-1'"),
    (with_file(digest=DIGEST.upper()), "digest of model.pt"),
    (with_file(digest=DIGEST + "\n"), "digest of model.pt"),
    (with_file(stamp=[1, 2]), "stamp is '.1, 2.' .* load that file with torch.load"),
    *((with_file(name=name), "file name") for name in BAD_NAMES),
    ({"files": with_file()["files"] * 2}, "once each"),
    *(({"target": target}, "target") for target in BAD_TARGETS),
    ({"target": "ckpt.pt", "files": []}, "empty without a file model.pt"),
)
def test_a_manifest_with_invalid_values_is_refused_with_value_and_reason(changes, reason):
    with pytest.raises(BadCheckpoint, match=reason.replace("[", r"\[")):
        Manifest.from_json(forged(**changes))


def test_oversized_manifests_and_details_that_are_no_json_are_refused(monkeypatch):
    for text in ("[" * 100_000, '{"fastckpt": ' + "9" * 10_000 + "}"):
        with pytest.raises(BadCheckpoint):
            Manifest.from_json(text)
    for value in (float("nan"), b"", {1, 2}):
        with pytest.raises(BadCheckpoint, match="no JSON"):
            replace(PLAIN, details={"a": value}).to_json()
    monkeypatch.setattr(module, "MAX_TEXT", 100)
    with pytest.raises(BadCheckpoint, match="at most 100 bytes"):
        Manifest.from_json(PLAIN.to_json())
