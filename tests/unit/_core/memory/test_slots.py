"""Records of a slot: complete or absent, whenever their writer dies, and whatever is in their place."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.slots import SlotBegin, SlotDone

OLD, NEW = SaveId(1, 5), SaveId(1, 6)
BOTH = frozenset({0, 1})


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


def test_an_empty_slot_holds_nothing(slot: Path):
    records = slots.read(slot)
    assert (records.begin, records.done, records.committed) == (None, {}, None)


def test_a_save_is_committed_when_all_writers_are_done(slot: Path):
    save(slot, OLD)
    assert slots.read(slot).committed is None
    save(slot, OLD, 1)
    assert slots.read(slot).committed is None
    save(slot, OLD, 1, 0)
    records = slots.read(slot)
    assert records.committed == OLD
    assert records.files == {"rank_0.pt": 10, "rank_1.pt": 11}
    assert records.details == {"path": "by 0"}


def test_images_of_a_slot_may_be_in_subdirectories(slot: Path):
    slots.begin(slot, SlotBegin(OLD, frozenset({0})))
    slots.commit(slot, 0, SlotDone(OLD, {"optimizer_0/.metadata": 1, "optimizer_0/__0_0.distcp": 2, "a.pt": 3}))
    assert slots.read(slot).committed == OLD


def test_images_of_former_writers_are_removed(slot: Path):
    for name in ("rank_0.pt", "rank_1.pt", "model.pt"):
        (slot / name).touch()
    slots.begin(slot, SlotBegin(OLD, BOTH))
    slots.commit(slot, 0, SlotDone(OLD, {"model.pt": 0, "rank_0.pt": 0}))
    slots.commit(slot, 1, SlotDone(OLD, {"model.pt": 0, "rank_1.pt": 0}))
    left = slots.begin(slot, SlotBegin(NEW, frozenset({0})))
    assert left == {"rank_1.pt"}
    slots.discard(slot, left)
    assert {path.name for path in slot.iterdir()} == {".begin", "model.pt", "rank_0.pt"}


def test_the_metadata_file_of_dcp_is_an_image(slot: Path):
    save(slot, OLD, 1)
    slots.commit(slot, 0, SlotDone(OLD, {".metadata": 7}))
    assert slots.read(slot).files == {".metadata": 7, "rank_1.pt": 11}


def test_a_save_without_writers_is_never_committed(slot: Path):
    slots.begin(slot, SlotBegin(OLD, frozenset()))
    assert slots.read(slot).committed is None


def test_records_of_different_saves_are_not_a_checkpoint(slot: Path):
    save(slot, OLD, 0, 1)
    slots.begin(slot, SlotBegin(NEW, BOTH))
    slots.commit(slot, 0, SlotDone(NEW, {}))
    slots.commit(slot, 1, SlotDone(OLD, {}))
    assert slots.read(slot).committed is None


def test_a_record_of_a_writer_that_was_not_expected_changes_nothing(slot: Path):
    save(slot, OLD, 0, 1)
    slots.commit(slot, 2, SlotDone(NEW, {"rank_2.pt": 1}))
    records = slots.read(slot)
    assert records.committed == OLD and "rank_2.pt" not in records.files


@pytest.mark.parametrize("deed", ["begin", "clear", "commit"])
def test_a_death_between_any_two_slot_operations_leaves_the_old_save_or_none(slot: Path, monkeypatch, deed: str):
    """Of begin and clear: the old one or none, never the new; of the last commit: none or the new one."""
    seen = set()
    for survived in range(8):
        save(slot, OLD, 0, 1)
        if deed == "commit":
            save(slot, NEW, 0)
        with monkeypatch.context() as patch:
            _die_after(patch, survived)
            try:
                if deed == "begin":
                    slots.begin(slot, SlotBegin(NEW, BOTH))
                elif deed == "clear":
                    slots.clear(slot)
                else:
                    slots.commit(slot, 1, SlotDone(NEW, {}))
            except Died:
                pass
        seen.add(slots.read(slot).committed)
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


def test_a_truncated_record_counts_as_none(slot: Path):
    save(slot, OLD, 0, 1)
    whole = (slot / ".done-1").read_bytes()
    for length in range(len(whole)):
        (slot / ".done-1").write_bytes(whole[:length])
        assert slots.read(slot).committed is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "writers", "files", "details", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(begin=json_values | st.just({"id": [1, 5], "writers": [0]}), done=json_values)
def test_foreign_files_in_place_of_records_are_no_checkpoint_and_no_error(slot: Path, begin: object, done: object):
    (slot / ".begin").write_text(json.dumps(begin))
    (slot / ".done-0").write_text(json.dumps(done))
    assert slots.read(slot).committed is None


def test_unknown_file_names_in_a_slot_are_ignored(slot: Path):
    save(slot, OLD, 0, 1)
    for name in (".done-", ".done-x", ".done-1x", ".tmp.done-3", "notes"):
        (slot / name).write_text("{}")
    assert slots.read(slot).committed == OLD


DIGESTS = {"rank_0.pt": "0" * 32, "rank_1.pt": "f" * 32}


class TestDigests:
    def test_digests_belong_to_the_save_they_were_computed_of(self, slot: Path):
        save(slot, OLD, 0, 1)
        assert slots.read(slot).digests == {}
        slots.write_digests(slot, OLD, DIGESTS)
        assert slots.read(slot).digests == DIGESTS

    def test_digests_of_another_save_do_not_count(self, slot: Path):
        save(slot, NEW, 0, 1)
        slots.write_digests(slot, OLD, DIGESTS)
        assert slots.read(slot).digests == {}

    def test_digests_of_an_uncommitted_save_do_not_count(self, slot: Path):
        save(slot, OLD, 0)
        slots.write_digests(slot, OLD, DIGESTS)
        assert slots.read(slot).digests == {}

    @pytest.mark.parametrize("deed", ["begin", "clear"])
    def test_digests_are_removed_before_the_records_of_their_save(self, slot: Path, monkeypatch, deed: str):
        """Whenever the owner dies: digests of a save are never beside another's records, nor the old ones alone."""
        for survived in range(8):
            save(slot, OLD, 0, 1)
            slots.write_digests(slot, OLD, DIGESTS)
            with monkeypatch.context() as patch:
                _die_after(patch, survived)
                try:
                    slots.begin(slot, SlotBegin(NEW, BOTH)) if deed == "begin" else slots.clear(slot)
                except Died:
                    pass
            whole, digests = slots.read(slot).committed == OLD, (slot / ".digests").exists()
            assert whole or not digests

    @pytest.mark.parametrize(
        "digests", [{"a": "x" * 32}, {"a": "0" * 31}, {"a": 1}, {"../a": "0" * 32}, {"/a": "0" * 32}, {".a": "0" * 32}]
    )
    def test_invalid_digests_do_not_count(self, slot: Path, digests: dict[str, str]):
        save(slot, OLD, 0, 1)
        slots.write_digests(slot, OLD, digests)
        assert slots.read(slot).digests == {}


GOOD_DONE = {"id": [1, 5], "files": {"a.pt": 3}, "details": {}}


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        "a/../b",
        "a//b",
        "a/",
        ".a/b",
        "a/.begin",
        "",
        ".begin",
        ".digests",
        "a\0b",
        "\ud800",
        "x" * 201,
        "a\nb",
    ],
)
def test_a_done_record_that_names_no_image_does_not_count(slot: Path, name: str):
    slots.begin(slot, SlotBegin(OLD, frozenset({0})))
    slots.commit(slot, 0, SlotDone(OLD, {"a.pt": 3}))
    assert slots.read(slot).committed == OLD
    slots.commit(slot, 0, SlotDone(OLD, {"a.pt": 3, name: 3}))
    assert slots.read(slot).committed is None


@pytest.mark.parametrize(
    "change",
    [{"details": {"world_size": "2"}}, {"details": {"parent": [1]}}, {"details": {"path": 5}}, {"files": {"a.pt": -1}},
     {"details": {"num_threads": []}}, {"files": {"a.pt": True}}, {"id": [1, -5]}, {"id": [True, 5]},
     {"id": [1, 2**70]}],
)  # fmt: skip
def test_a_done_record_with_invalid_values_does_not_count(slot: Path, change: dict[str, object]):
    slots.begin(slot, SlotBegin(OLD, frozenset({0})))
    for record, whole in ((GOOD_DONE, OLD), (GOOD_DONE | change, None)):
        (slot / ".done-0").write_text(json.dumps(record))
        assert slots.read(slot).committed == whole


@pytest.mark.parametrize("record", [".begin", ".done-0", ".digests"])
@pytest.mark.parametrize(
    "kind", ["fifo", "link", "directory", "giant", "long", "deep", "no utf-8", "surrogates", "huge number"]
)
def test_records_that_are_no_files_are_ignored_and_replaced(slot: Path, tmp_path: Path, record: str, kind: str):
    save(slot, OLD, 0, 1)
    slots.write_digests(slot, OLD, DIGESTS)
    good = (slot / record).read_bytes()
    (slot / record).unlink()
    if kind == "fifo":
        os.mkfifo(slot / record)
    elif kind == "link":
        (tmp_path / "good").write_bytes(good)
        (slot / record).symlink_to(tmp_path / "good")
    elif kind == "directory":
        (slot / record).mkdir()
        (slot / record / "x").touch()
    elif kind == "giant":
        (slot / record).write_bytes(good)
        os.truncate(slot / record, 10 << 30)
    else:
        strange = {
            "long": good + b" " * (1 << 20),
            "deep": b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "no utf-8": good.replace(b"id", b"\xff\xfe"),
            "surrogates": good.replace(b"id", b"\\ud800"),
            "huge number": good.replace(b"1,", b"9" * 5000 + b","),
        }
        (slot / record).write_bytes(strange[kind])
    records = slots.read(slot)
    assert (records.committed, records.digests) == (OLD if record == ".digests" else None, {})
    save(slot, NEW, 0, 1)
    assert slots.read(slot).committed == NEW and slots.read(slot).digests == {}


@pytest.mark.parametrize("kind", ["missing", "short", "link", "fifo", "directory"])
def test_an_image_that_is_not_what_was_committed_is_named(slot: Path, tmp_path: Path, kind: str):
    save(slot, OLD, 0, 1)
    for writer in BOTH:
        (slot / f"rank_{writer}.pt").write_bytes(bytes(10 + writer))
    assert slots.damage(slot, slots.read(slot).files) == ""
    image = slot / "rank_1.pt"
    image.rename(tmp_path / "elsewhere")
    if kind == "short":
        image.write_bytes(bytes(10))
    elif kind == "link":
        image.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(image)
    elif kind == "directory":
        image.mkdir()
    assert "rank_1.pt" in slots.damage(slot, slots.read(slot).files)


def mutated(good: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes; and good ones of which a part was overwritten, cut out or doubled."""
    places = st.tuples(st.integers(0, len(good)), st.integers(0, len(good)), st.binary(max_size=8))
    changed = st.lists(places, min_size=0, max_size=3).map(lambda edits: _edited(good, edits))
    return st.binary(max_size=200) | changed | st.just(good)


def _edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for start, end, new in edits:
        data = data[:start] + new + data[end:]
    return data


BEGIN = json.dumps({"id": [1, 5], "writers": [0, 1]}).encode()
DONE = [json.dumps({"id": [1, 5], "files": {f"r{w}.pt": 3}, "details": {"world_size": 2}}).encode() for w in (0, 1)]
DIGEST = json.dumps({"id": [1, 5], "digests": {"r0.pt": "0" * 32}}).encode()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(begin=mutated(BEGIN), first=mutated(DONE[0]), second=mutated(DONE[1]), digest=mutated(DIGEST))
def test_any_bytes_in_records_are_no_error_and_commit_only_complete_saves(
    slot: Path, begin: bytes, first: bytes, second: bytes, digest: bytes
):
    """By another reading of the same rule: the begun id is in the done record of each writer that it lists."""
    for name, data in ((".begin", begin), (".done-0", first), (".done-1", second), (".digests", digest)):
        (slot / name).write_bytes(data)
    records = slots.read(slot)
    if records.committed is None:
        assert records.digests == {}
        return
    begun = json.loads(begin)
    assert begun["writers"] and set(begun["writers"]) <= {0, 1}
    done = [json.loads((first, second)[writer]) for writer in begun["writers"]]
    assert all(one["id"] == begun["id"] == list(records.committed) for one in done)
    assert set(records.files) == {name for one in done for name in one["files"]}
    assert all("/" not in name and not name.startswith(".") for name in records.files)
    if records.digests:
        assert json.loads(digest)["id"] == begun["id"]
    assert isinstance(records.details, dict) and slots.damage(slot, records.files)
