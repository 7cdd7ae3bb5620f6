"""Records of a slot: complete or absent, whenever their writer dies, and whatever is in their place."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.slots import SlotBegin, SlotDone

OLD, NEW = SaveId(1, 5), SaveId(1, 6)
BOTH = frozenset({0, 1})
DIGESTS = {"rank_0.pt": "0" * 32, "rank_1.pt": "f" * 32}


class Died(Exception):
    """The process ends here."""


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    path = tmp_path / "slot-0"
    path.mkdir()
    return path


def save(slot: Path, id: SaveId, *writers: int) -> None:
    slots.begin(slot, SlotBegin(id, BOTH))
    for writer in writers:
        slots.commit(slot, writer, SlotDone(id, {f"rank_{writer}.pt": 10 + writer}, {"path": f"by {writer}"}))


def test_a_save_is_committed_when_all_writers_are_done(slot: Path):
    records = slots.read(slot)
    assert (records.begin, records.done, records.committed) == (None, {}, None)
    for writers in ((), (1,)):
        save(slot, OLD, *writers)
        assert slots.read(slot).committed is None
    save(slot, OLD, 1, 0)
    records = slots.read(slot)
    assert records.committed == OLD
    assert records.files == {"rank_0.pt": 10, "rank_1.pt": 11}
    assert records.details == {"path": "by 0"}
    slots.commit(slot, 2, SlotDone(NEW, {"rank_2.pt": 1}))  # which was not expected
    for name in (".done-", ".done-x", ".done-1x", ".tmp.done-3", "notes"):
        (slot / name).write_text("{}")
    assert slots.read(slot).committed == OLD and "rank_2.pt" not in slots.read(slot).files
    files = {".metadata": 7, "optimizer_0/.metadata": 1, "optimizer_0/__0_0.distcp": 2}
    slots.commit(slot, 0, SlotDone(OLD, files))
    assert slots.read(slot).files == files | {"rank_1.pt": 11}
    slots.begin(slot, SlotBegin(NEW, BOTH))
    slots.commit(slot, 0, SlotDone(NEW, {}))
    slots.commit(slot, 1, SlotDone(OLD, {}))  # records of different saves are no checkpoint
    assert slots.read(slot).committed is None
    slots.begin(slot, SlotBegin(OLD, frozenset()))  # nor is one without writers
    assert slots.read(slot).committed is None


def test_images_of_former_writers_are_removed(slot: Path):
    for name in ("rank_0.pt", "rank_1.pt", "model.pt"):
        (slot / name).touch()
    slots.begin(slot, SlotBegin(OLD, BOTH))
    for writer in BOTH:
        slots.commit(slot, writer, SlotDone(OLD, {"model.pt": 0, f"rank_{writer}.pt": 0}))
    left = slots.begin(slot, SlotBegin(NEW, frozenset({0})))
    assert left == {"rank_1.pt"}
    slots.discard(slot, left)
    assert {path.name for path in slot.iterdir()} == {".begin", "model.pt", "rank_0.pt"}


DEEDS = {
    "begin": lambda slot: slots.begin(slot, SlotBegin(NEW, BOTH)),
    "clear": slots.clear,
    "commit": lambda slot: slots.commit(slot, 1, SlotDone(NEW, {})),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_death_between_any_two_slot_operations_leaves_the_old_save_or_none(slot: Path, monkeypatch, deed: str):
    """Of begin and clear: the old one or none, never the new; of the last commit: none or the new one.

    Digests of a save are never beside another's records, nor the old ones alone.
    """
    seen = set()
    for survived in range(8):
        save(slot, OLD, 0, 1)
        slots.write_digests(slot, OLD, DIGESTS)
        if deed == "commit":
            save(slot, NEW, 0)
        with monkeypatch.context() as patch, suppress(Died):
            _die_after(patch, survived)
            DEEDS[deed](slot)
        seen.add(committed := slots.read(slot).committed)
        assert committed == OLD or not (slot / ".digests").exists()
    assert seen == ({None, NEW} if deed == "commit" else {None, OLD})


def _die_after(patch: pytest.MonkeyPatch, operations: int) -> None:
    left = iter(range(operations))
    for name in ("unlink", "rename"):
        real = getattr(Path, name)

        def operation(self: Path, *args: object, _real=real, **kwargs: object) -> object:
            if next(left, None) is None:
                raise Died
            return _real(self, *args, **kwargs)

        patch.setattr(Path, name, operation)


def test_digests_belong_to_the_committed_save_they_were_computed_of(slot: Path):
    save(slot, OLD, 0)
    slots.write_digests(slot, OLD, DIGESTS)
    assert slots.read(slot).digests == {}, "of an uncommitted save"
    save(slot, OLD, 0, 1)
    assert slots.read(slot).digests == {}
    slots.write_digests(slot, OLD, DIGESTS)
    assert slots.read(slot).digests == DIGESTS
    for name, digest in (("a", "x" * 32), ("a", "0" * 31), ("a", 1), *((n, "0" * 32) for n in ("../a", "/a", ".a"))):
        slots.write_digests(slot, OLD, {name: digest})
        assert slots.read(slot).digests == {}, (name, digest)
    save(slot, NEW, 0, 1)
    slots.write_digests(slot, OLD, DIGESTS)
    assert slots.read(slot).digests == {}, "of another save"


BAD_BEGINS = [5, None, [], {}, {"id": [1, 5]}, {"id": 5, "writers": [0]}]
BAD_BEGINS += [{"id": [1, 5], "writers": writers} for writers in ("0", [False], [0, -1], [[0]], {"0": 1})]
NO_IMAGES = ["../../etc/passwd", "/etc/passwd", "..", "a/../b", "a//b", "a/", ".a/b", "a/.begin", "", ".begin"]
CHANGES = [
    *({"files": {"a.pt": 3, name: 3}} for name in (*NO_IMAGES, "a\0b", "\ud800", "x" * 201, "a\nb")),
    *({"details": details} for details in ({"world_size": "2"}, {"parent": [1]}, {"path": 5}, {"num_threads": []})),
    *({"files": {"a.pt": size}} for size in (-1, True)),
    *({"id": id} for id in ([1, -5], [True, 5], [1, 2**70])),
]
BEGIN, DONE = {"id": [1, 5], "writers": [0]}, {"id": [1, 5], "files": {"a.pt": 3}, "details": {}}


def test_records_with_invalid_values_do_not_count(slot: Path):
    records = [(BEGIN, DONE), *((begin, DONE) for begin in BAD_BEGINS), *((BEGIN, DONE | each) for each in CHANGES)]
    for number, (begin, done) in enumerate(records):
        (slot / ".begin").write_text(json.dumps(begin))
        (slot / ".done-0").write_text(json.dumps(done))
        assert slots.read(slot).committed == (None if number else OLD), (begin, done)


def giant(path: Path, good: Path) -> None:
    shutil.copy(good, path)
    os.truncate(path, 10 << 30)


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], object]:
    return lambda path, good: path.write_bytes(change(good.read_bytes()))


STRANGE: dict[str, Callable[[Path, Path], object]] = {
    "fifo": lambda path, _: os.mkfifo(path),
    "link": lambda path, good: path.symlink_to(good),
    "directory": lambda path, _: (path / "x").mkdir(parents=True),
    "giant": giant,
    "long": changed(lambda good: good + b" " * (1 << 20)),
    "deep": changed(lambda _: b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no utf-8": changed(lambda good: good.replace(b"id", b"\xff\xfe")),
    "surrogates": changed(lambda good: good.replace(b"id", b"\\ud800")),
    "huge number": changed(lambda good: good.replace(b"1,", b"9" * 5000 + b",")),
}


@pytest.mark.parametrize("record", [".begin", ".done-0", ".digests"])
def test_records_that_are_no_files_are_ignored_and_replaced(slot: Path, tmp_path: Path, record: str):
    for kind, make in STRANGE.items():
        save(slot, OLD, 0, 1)
        slots.write_digests(slot, OLD, DIGESTS)
        shutil.move(slot / record, tmp_path / kind)
        make(slot / record, tmp_path / kind)
        records = slots.read(slot)
        assert (records.committed, records.digests) == (OLD if record == ".digests" else None, {}), kind
        save(slot, NEW, 0, 1)
        assert slots.read(slot).committed == NEW and slots.read(slot).digests == {}, kind


def test_an_image_that_is_not_what_was_committed_is_named(slot: Path, tmp_path: Path):
    save(slot, OLD, 0, 1)
    for kind in ("link", "fifo", "directory", "missing", "short"):
        for writer in BOTH:
            (slot / f"rank_{writer}.pt").write_bytes(bytes(10 + writer))
        assert slots.damage(slot, slots.read(slot).files) == ""
        shutil.move(path := slot / "rank_1.pt", good := tmp_path / kind)
        if kind == "short":
            path.write_bytes(bytes(10))
        elif kind != "missing":
            STRANGE[kind](path, good)
        assert "rank_1.pt" in slots.damage(slot, slots.read(slot).files), kind
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
