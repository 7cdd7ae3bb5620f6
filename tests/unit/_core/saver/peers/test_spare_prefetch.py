"""A spare that prefetches what a node alone has, from real agents: whole or not at all, and one save at a time."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.rate import RateLimit
from fastckpt._core.memory import replica_files, slots
from fastckpt._core.memory.held_saves import HeldSave, held_saves, kept_place
from fastckpt._core.saver.peers import fetcher, spare_prefetch
from fastckpt._core.saver.peers.common_saves import HeldReport
from fastckpt._core.saver.peers.fetcher import FetchedFiles
from fastckpt._core.saver.peers.spare_prefetch import SparePrefetch
from fastckpt._core.saver.slot import Slot
from tests.support.waits import until
from tests.unit._core.saver.peers.agents import ATTEMPT, DIRECTORY, SECRET, Agent, name_of, write_save

SHARDS, STATES, COMMON = "__1_0.distcp", "rank_1.pt", "model.pt"
SIZE = (4 << 20) + 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a MiB count as large."""
    for module in (replica_files, spare_prefetch):
        monkeypatch.setattr(module, "SMALL", 1 << 20)


class First(Agent):
    """The first agent of a round, which has a save of its own and answers the spare."""

    def __init__(self, folder: Path) -> None:
        own = [Slot(folder / f"slot-{number}") for number in range(2)]
        for slot in own:
            slot.path.mkdir(parents=True)
        super().__init__(folder, own)

    def save(self, step: int) -> None:
        """Have a save of one large file and two small ones become the common one, of which nobody has a copy."""
        id = SaveId(1, step)
        files = {SHARDS: bytes([step]) * SIZE, STATES: b"r" * 10, COMMON: b"m" * 7}
        write_save(self.slots[step % 2].path, step, files, 1)
        common = self.peers.common_saves(DIRECTORY)
        common.report(HeldReport("agent", frozenset({id})))
        common.report(HeldReport("agent", frozenset({id}), id, large=SIZE))


class Spare:
    """A spare, and the events of what it has prefetched."""

    def __init__(self, arenas: Path, first: First) -> None:
        self.arenas, self.first, self.events = arenas, first, list[dict[str, Any]]()
        self.settings = Settings(shm_dir=str(arenas), replicas="0")
        self.prefetch = SparePrefetch(self.settings, lambda directory: 0)
        self._asked, self._linked = 0, self.prefetch._linked
        self.prefetch._linked = self._count  # type: ignore[method-assign]

    def _count(self, *arguments: Any) -> Any:
        self._asked += 1
        return self._linked(*arguments)

    def begin(self, secret: bytes = SECRET) -> None:
        self._asked = 0
        self.prefetch.begin(lambda: self.first.address, secret)

    def has_looked(self) -> None:
        """Wait until it has asked for the save and for its files, and asks again."""
        until(lambda: self._asked >= 3)

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "prefetched":
            self.events.append(event)

    def steps(self) -> list[int]:
        return [event["step"] for event in self.events]

    def staged(self) -> list[int]:
        """Steps whose large file is there."""
        return [path.read_bytes()[0] for path in self.arenas.rglob(SHARDS)]

    def unfinished(self) -> list[Path]:
        return [*self.arenas.rglob(".new-*")]

    def hand_over(self, arena: Path) -> HeldSave:
        """What the rank has that is taken."""
        arena.mkdir(exist_ok=True)
        self.prefetch.hand_over(DIRECTORY, arena, threading.RLock())
        (held,) = held_saves(arena, [])
        assert held.files[SHARDS].read_bytes() == bytes([held.id.step]) * SIZE
        return held


@pytest.fixture
def first(tmp_path: Path) -> Iterator[First]:
    made = First(tmp_path / "first")
    yield made
    made.peers.close()


@pytest.fixture
def spare(tmp_path: Path, first: First, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    monkeypatch.setattr(spare_prefetch, "RETRY", 0.05)
    (tmp_path / "arenas").mkdir()
    made = Spare(tmp_path / "arenas", first)
    metrics.listen(made.hear)
    yield made
    metrics.unlisten(made.hear)
    made.prefetch.close()
    assert [*made.arenas.iterdir()] == []


def test_what_is_prefetched_becomes_that_of_the_rank_that_is_taken(first: First, spare: Spare, tmp_path: Path):
    """Another rank takes none of it."""
    first.save(5)
    spare.begin()
    until(spare.steps)
    arena, save = tmp_path / "arena", name_of(5)
    held = spare.hand_over(arena)
    assert (held.id, held.attempt, held.slot, held.parts.keys()) == (SaveId(1, 5), ATTEMPT, None, {1})
    assert held.sizes == {SHARDS: SIZE, STATES: 10}  # what each node has comes from the others
    assert held.digests.keys() == {SHARDS, STATES}
    assert spare.events[0]["bytes"] == SIZE and spare.events[0]["host"] == "node1"
    kept, slot = kept_place(arena, save.id, ATTEMPT), arena / "slot-0"
    slot.mkdir()
    (slot / COMMON).write_bytes(b"m" * 7)
    came = FetchedFiles({COMMON: 7}, {COMMON: "0" * 32})
    assert fetcher.with_kept(slot, kept, save, came, [0]) == came and (kept / SHARDS).exists()
    files = fetcher.with_kept(slot, kept, save, came, [1])
    assert files.sizes == {COMMON: 7, SHARDS: SIZE, STATES: 10} and not (kept / SHARDS).exists()
    assert fetcher.make_ours(slot, save, files, [1], 1)
    (held,) = held_saves(arena, [slot])
    assert held.slot == slot and held.files[SHARDS].read_bytes() == bytes([5]) * SIZE


def test_a_newer_save_takes_the_place_of_one_that_was_prefetched_and_none_comes_twice(
    first: First, spare: Spare, tmp_path: Path
):
    """Also if the spare waits again."""
    spare.begin()
    for step in (1, 2, 3):
        first.save(step)
        until(lambda step=step: spare.steps()[-1:] == [step])
        assert spare.staged() == [step]
    spare.begin()
    spare.has_looked()
    assert spare.staged() == [3] and spare.steps() == [1, 2, 3]
    assert spare.hand_over(tmp_path / "arena").id == SaveId(1, 3)
    assert [*spare.arenas.iterdir()] == []


@pytest.mark.parametrize("dies", [False, True])
def test_a_spare_that_has_a_rank_or_loses_its_source_keeps_what_was_whole_before(
    first: First, spare: Spare, tmp_path: Path, dies: bool
):
    """And gives up at once what is on its way: two seconds at the limit that copies have would be left."""
    first.save(1)
    spare.begin()
    until(spare.steps)
    first.peers.rate = RateLimit(2e6)
    first.save(2)
    until(spare.unfinished)
    if dies:
        first.peers.close()
        until(lambda: not spare.unfinished())
        assert spare.steps() == [1] and spare.staged() == [1]
        return
    begin = time.monotonic()
    assert spare.hand_over(tmp_path / "arena").id == SaveId(1, 1)
    assert time.monotonic() - begin < 0.5 and spare.unfinished() == []


def test_a_damaged_file_is_not_prefetched_before_it_is_sound(first: First, spare: Spare):
    first.save(1)
    slot = first.slots[1].path
    slots.write_digests(slot, SaveId(1, 1), {SHARDS: "0" * 32})
    spare.begin()
    spare.has_looked()
    assert spare.steps() == [] and spare.staged() == []
    slots.write_digests(slot, SaveId(1, 1), {})
    until(spare.steps)


def test_without_memory_for_two_slots_beside_nothing_is_prefetched_and_one_line_says_so(
    first: First, spare: Spare, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    found = spare_prefetch.headroom(spare.arenas)
    free = 3 * (SIZE + 10) + 2 * 7 - 1
    monkeypatch.setattr(spare_prefetch, "headroom", lambda place: replace(found, free=free))
    for step in (1, 2):
        first.save(step)
        spare.begin()
        spare.has_looked()
    (line,) = [record.getMessage() for record in caplog.records if "prefetches nothing" in record.getMessage()]
    assert spare.steps() == [] and "node1" in line and "4.0 MiB" in line
    free += 1
    first.save(3)
    until(spare.steps)


def test_an_answer_without_a_field_is_refused():
    with pytest.raises(spare_prefetch.ProtocolError):
        spare_prefetch.SaveAtRisk.from_json({"id": [1, 2]})


def test_what_a_dead_spare_has_left_is_removed_by_the_next_one(first: First, spare: Spare):
    first.save(1)
    dead = SparePrefetch(spare.settings, lambda directory: 0)
    dead.begin(lambda: first.address, SECRET)
    until(spare.steps)
    dead.end()
    for staged in dead._staged.values():
        staged.arena.release()  # as the kernel releases its lock
    (left,) = spare.arenas.iterdir()
    spare.prefetch.begin(lambda: "", SECRET)
    until(lambda: not left.exists())
