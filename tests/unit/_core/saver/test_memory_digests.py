"""Digests beside slots: of the save that stays the newest, and of persisted ones; without delaying anything."""

import time
from pathlib import Path

import pytest

from fastckpt._core.io.direct import digest_file
from fastckpt._core.memory import slots
from fastckpt._core.saver import memory_digests
from fastckpt.ddp import DdpCheckpointer, StorageType
from tests.e2e.ddp.conftest import Ranks, state, until
from tests.unit._core.saver.peers.agents import flip


def digests(slot: Path) -> dict[str, str]:
    return slots.read(slot).digests


def save(member: DdpCheckpointer, step: int, kind: StorageType = StorageType.MEMORY) -> bool:
    return bool(member.save_checkpoint(step, state(step), storage_type=kind))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_digests, "SETTLED", 0.02)


def test_a_persisted_save_gets_the_digests_of_its_copy(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, directory: Path):
    """Its bytes are not read again."""
    monkeypatch.setattr(memory_digests, "SETTLED", 0.1)
    read: list[Path] = []
    monkeypatch.setattr(memory_digests, "digest_file", lambda path, **_: read.append(path) or "0" * 32)
    (one,) = ranks.start()
    save(one, 1, StorageType.DISK)
    one.wait_latest_checkpoint(60)
    slot = ranks.slot_of(1)
    assert digests(slot) == {name: digest_file(slot / name) for name in slots.read(slot).files}
    assert digests(slot)["model.pt"] == digest_file(directory / "checkpoint-1" / "model.pt")
    time.sleep(0.3)
    assert read == []


class TestAfterWorkersDied:
    """What was digested before is read again, so that those who come need not."""

    def saved(self, ranks: Ranks) -> Path:
        for member in ranks.start(2):
            save(member, 1, StorageType.DISK)
        slot = ranks.slot_of(1)
        until(lambda: len(digests(slot)) == 3, "digests")
        return slot

    def die(self, ranks: Ranks) -> None:
        """Workers die, and the saver verifies."""
        assert ranks.saver is not None
        (coordinator,) = ranks.saver._coordinators.values()
        ranks.workers_die()
        until(lambda: coordinator.readers.verified() != [], "verification")
        ranks.start_workers(2)

    def test_workers_verify_what_was_only_persisted_before(self, ranks: Ranks, monkeypatch):
        monkeypatch.setattr(memory_digests, "SETTLED", 60)
        slot = self.saved(ranks)
        ranks.workers_die()
        ranks.start_workers(2)
        flip(slot / "model.pt", 3000)
        assert {*ranks.resume()} == {(1, "storage")}

    def test_workers_verify_again_after_a_further_save(self, ranks: Ranks, soon):
        slot = self.saved(ranks)
        self.die(ranks)
        ranks.load()
        for member in ranks.members:
            save(member, 2)
        flip(slot / "model.pt", 3000)
        until(lambda: len(digests(ranks.slot_of(2))) == 3, "digests")
        flip(ranks.slot_of(2) / "model.pt", 3000)
        assert {*ranks.resume()} == {(1, "storage")}

    def test_memory_that_changed_since_its_digest_is_discarded(self, ranks: Ranks, soon, said, monkeypatch):
        slot = self.saved(ranks)
        flip(slot / "rank_1.pt", 100)
        ranks.workers_die()
        until(lambda: slots.read(slot).committed is None, "the end of a bad slot")
        assert "step 1 of history 1 in memory is bad, and given up" in said.text
        ranks.start_workers(2)
        assert {*ranks.resume()} == {(1, "storage")}
