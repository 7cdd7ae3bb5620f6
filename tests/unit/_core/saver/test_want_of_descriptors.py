"""Memory that an agent cannot look at for want of descriptors: that is no reason to give it up."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import held_saves, records, slots
from fastckpt._core.memory.directory_claim import DirectoryClaim
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.saver.persistence.persist_job import hand_over
from fastckpt._core.saver.slot import Slot
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.unit._core.saver.descriptors import no_descriptors
from tests.unit._core.saver.peers.agents import write_save

SAVE = SaveId(1, 7)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PAUSE", 0.0)


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    """A slot with a whole save, in an arena that says of which directory it is."""
    place = tmp_path / "slot-0"
    place.mkdir()
    write_save(place, 7, {"model.pt": b"x"}, 0)
    DirectoryClaim("a mark", "a mark", 5).write(tmp_path)
    return place


LOOKS: dict[str, Callable[[Path], object]] = {
    "records": slots.read,
    "recovery": lambda slot: Slot(slot).recover(),
    "report": lambda slot: Slot(slot).read_part(0),
    "listing": lambda slot: held_saves.held_saves(slot.parent, [slot]),
    "opening": Opening.of_slot,
    "persist": lambda slot: hand_over(CheckpointDirectory(slot.parent / "c"), slot, SAVE, ""),
    "claim": lambda slot: DirectoryClaim.read(slot.parent),
}


def test_want_of_descriptors_is_an_error_with_its_remedy_and_the_save_stays(slot: Path):
    for name, look in LOOKS.items():
        with no_descriptors(), pytest.raises(OSError, match="raise ulimit -n") as caught:
            look(slot)
        assert caught.value.errno == errno.EMFILE, name
        assert slots.read(slot).committed == SAVE, name
        assert DirectoryClaim.read(slot.parent).seen == "a mark", name


def test_want_of_descriptors_for_a_moment_is_not_noticed(slot: Path, monkeypatch: pytest.MonkeyPatch):
    with no_descriptors() as end:
        monkeypatch.setattr("time.sleep", lambda _: end())
        found = Slot(slot)
        found.recover()
    assert (found.id, found.committed) == (SAVE, True)
