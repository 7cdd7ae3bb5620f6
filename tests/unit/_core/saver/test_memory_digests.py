"""Digests beside slots: of the save that stays the newest, and of persisted ones; without delaying anything."""

import threading
import time
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.direct import digest_file
from fastckpt._core.memory import slots
from fastckpt._core.resume import tiers
from fastckpt._core.saver import memory_digests
from fastckpt.ddp import StorageType
from tests.e2e.ddp.conftest import Ranks, state, until


def digests(slot: Path) -> dict[str, str]:
    return slots.read(slot).digests


def slot_of(ranks: Ranks, step: int) -> Path:
    arena = ranks.members[0]._writer.link.arena
    (slot,) = [slot for slot in arena.glob("slot-*") if (slots.read(slot).committed or (0, -1))[1] == step]
    return slot


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_digests, "SETTLED", 0.02)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, soon: None) -> tuple[threading.Event, threading.Event]:
    """Digesting is held up after its first block: whether it has come so far, and what lets it go on."""
    begun, go_on = threading.Event(), threading.Event()
    wait_for = memory_digests._Pace.wait_for

    def slowly(self: memory_digests._Pace, count: int) -> None:
        begun.set()
        go_on.wait(30)
        wait_for(self, count)

    monkeypatch.setattr(memory_digests._Pace, "wait_for", slowly)
    return begun, go_on


def test_a_save_that_stays_the_newest_is_digested(ranks: Ranks):
    first, second = ranks.start(2)
    for member in (first, second):
        member.save_checkpoint(
            1, state(member._writer.place.rank), rank_state={"at": 1}, storage_type=StorageType.MEMORY
        )
    slot = slot_of(ranks, 1)
    assert digests(slot) == {}
    until(lambda: digests(slot) != {}, "digests")
    files = slots.read(slot).files
    assert sorted(files) == ["model.pt", "rank_0.pt", "rank_1.pt"]
    assert digests(slot) == {name: digest_file(slot / name) for name in files}


def test_a_save_that_does_not_stay_the_newest_is_not_digested(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    monkeypatch.setattr(memory_digests, "SETTLED", 0.4)
    monkeypatch.setattr(memory_digests, "digest_file", lambda path, **_: read.append(path.name) or "0" * 32)
    (one,) = ranks.start()
    end = time.monotonic() + 2
    step = 0
    while time.monotonic() < end:
        step += 1
        assert one.save_checkpoint(step, state(step), storage_type=StorageType.MEMORY)
    assert read == []
    until(lambda: read == ["model.pt", "rank_0.pt"], "one digest at the end")
    time.sleep(0.5)
    assert len(read) == 2


def test_a_persisted_save_gets_the_digests_of_its_copy(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, directory: Path):
    """Its bytes are not read again."""
    monkeypatch.setattr(memory_digests, "SETTLED", 0.1)
    monkeypatch.setattr(memory_digests, "digest_file", lambda *_, **__: pytest.fail("read once more"))
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1), storage_type=StorageType.DISK)
    one.wait_latest_checkpoint(60)
    slot = slot_of(ranks, 1)
    assert digests(slot) == {name: digest_file(slot / name) for name in slots.read(slot).files}
    assert digests(slot)["model.pt"] == digest_file(directory / "checkpoint-1" / "model.pt")
    time.sleep(0.3)


def test_a_slot_that_is_being_digested_accepts_the_next_save(ranks: Ranks, held: tuple[threading.Event, ...]):
    """It is no reason to skip one; nor are digests of the old save written beside the new one."""
    begun, go_on = held
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY)
    slot = slot_of(ranks, 1)
    assert begun.wait(30)
    for step in range(2, 8):
        assert one.save_checkpoint(step, state(step), storage_type=StorageType.MEMORY), (
            "each slot was written to in turn"
        )
    go_on.set()
    until(lambda: digests(slot_of(ranks, 7)) != {}, "digests of the newest")
    for path in slot.parent.glob("slot-*"):
        for name, digest in digests(path).items():
            assert digest == digest_file(path / name)
    assert slots.read(slot).committed != SaveId(1, 1)


def test_a_save_into_another_slot_stops_digesting(ranks: Ranks, held: tuple[threading.Event, ...], monkeypatch):
    begun, go_on = held
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY)
    assert begun.wait(30)
    monkeypatch.setattr(memory_digests, "SETTLED", 3600)
    one.save_checkpoint(2, state(2), storage_type=StorageType.MEMORY)
    (coordinator,) = ranks.saver._coordinators.values()
    go_on.set()
    until(coordinator.digester._task.done, "it has stopped")
    assert digests(slot_of(ranks, 1)) == {}, "which was still there to be digested"


def test_a_failure_and_the_end_do_not_wait_for_digesting(ranks: Ranks, held: tuple[threading.Event, ...]):
    begun, go_on = held
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY)
    assert begun.wait(30)
    start = time.monotonic()
    ranks.workers_die()
    (one,) = ranks.start_workers()
    assert one.load_checkpoint()["step"] == 1 and one.loaded_from == "memory"
    ranks.end()
    assert time.monotonic() - start < 15
    go_on.set()


def test_adopted_memory_is_digested(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, soon: None):
    monkeypatch.setenv("FASTCKPT_FLUSH", "0")
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY)
    slot = slot_of(ranks, 1)
    until(lambda: digests(slot) != {}, "digests")
    before = digests(slot)
    (slot / ".digests").unlink()
    ranks.workers_die()
    until(lambda: digests(slot) == before, "digests once more")


def test_an_unreadable_image_is_reported_by_digesting(ranks: Ranks, soon: None, monkeypatch: pytest.MonkeyPatch, said):
    def refuse(*_: object, **__: object) -> str:
        raise OSError("unreadable")

    monkeypatch.setattr(memory_digests, "digest_file", refuse)
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY)
    until(lambda: "in memory could not be computed: unreadable" in said.text, "a warning")
    assert one.save_checkpoint(2, state(2), storage_type=StorageType.MEMORY)


def test_with_verify_never_nothing_is_digested(ranks: Ranks, soon: None):
    (one,) = ranks.start(verify="never")
    one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY)
    time.sleep(0.5)
    assert digests(slot_of(ranks, 1)) == {}


class TestAfterWorkersDied:
    """What was digested before is read again, so that those who come need not."""

    def saved(self, ranks: Ranks) -> Path:
        for member in ranks.start(2):
            member.save_checkpoint(1, state(1), storage_type=StorageType.DISK)
        slot = slot_of(ranks, 1)
        until(lambda: len(digests(slot)) == 3, "digests")
        return slot

    def verified(self, ranks: Ranks) -> bool:
        assert ranks.saver is not None
        (coordinator,) = ranks.saver._coordinators.values()
        return coordinator.readers.verified() != []

    def test_workers_do_not_verify_again_what_the_saver_has_verified(self, ranks: Ranks, soon, monkeypatch):
        self.saved(ranks)
        ranks.workers_die()
        until(lambda: self.verified(ranks), "verification")
        ranks.start_workers(2)
        monkeypatch.setattr(tiers, "digest", None)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]
        assert {member.loaded_from for member in ranks.members} == {"memory"}

    def test_workers_do_not_verify_again_what_was_flushed_since(self, ranks: Ranks, monkeypatch):
        for member in ranks.start(2):
            member.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY)
        ranks.workers_die()
        until(lambda: self.verified(ranks), "flush")
        ranks.start_workers(2)
        monkeypatch.setattr(tiers, "digest", None)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]

    def test_workers_verify_what_was_only_persisted_before(self, ranks: Ranks, monkeypatch):
        monkeypatch.setattr(memory_digests, "SETTLED", 60)
        slot = self.saved(ranks)
        ranks.workers_die()
        ranks.start_workers(2)
        flip(slot / "model.pt")
        ranks.load()
        assert {(member.loaded_step, member.loaded_from) for member in ranks.members} == {(1, "storage")}

    def test_workers_verify_again_after_a_further_save(self, ranks: Ranks, soon):
        slot = self.saved(ranks)
        ranks.workers_die()
        until(lambda: self.verified(ranks), "verification")
        ranks.start_workers(2)
        ranks.load()
        for member in ranks.members:
            member.save_checkpoint(2, state(2), storage_type=StorageType.MEMORY)
        flip(slot / "model.pt")
        flip(slot_of(ranks, 2) / "model.pt")
        until(lambda: len(digests(slot_of(ranks, 2))) == 3, "digests")
        flip(slot_of(ranks, 2) / "model.pt")
        ranks.load()
        assert {(member.loaded_step, member.loaded_from) for member in ranks.members} == {(1, "storage")}

    def test_memory_that_changed_since_its_digest_is_discarded(self, ranks: Ranks, soon, said, monkeypatch):
        slot = self.saved(ranks)
        flip(slot / "rank_1.pt")
        ranks.workers_die()
        until(lambda: slots.read(slot).committed is None, "the end of a bad slot")
        assert "step 1 of history 1 in memory is bad, and given up" in said.text
        ranks.start_workers(2)
        ranks.load()
        assert {(member.loaded_step, member.loaded_from) for member in ranks.members} == {(1, "storage")}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
