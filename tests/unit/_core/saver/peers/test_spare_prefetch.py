"""A spare that prefetches what a node alone has, from real agents: whole or not at all, and one save at a time."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.rate import RateLimit
from fastckpt._core.memory import replica_files, slots
from fastckpt._core.memory.held_saves import held_saves, kept_place
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.memory.slots import SlotBegin, SlotDone
from fastckpt._core.saver.peers import fetcher, spare_prefetch
from fastckpt._core.saver.peers.agent_peers import AgentPeers, NodeMemory
from fastckpt._core.saver.peers.common_saves import HeldReport
from fastckpt._core.saver.peers.fetcher import FetchedFiles
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.spare_prefetch import SparePrefetch
from fastckpt._core.saver.slot import Slot

SECRET, ATTEMPT, DIRECTORY = b"secret", "token", "/checkpoints"
SHARDS, STATES, COMMON = "__1_0.distcp", "rank_1.pt", "model.pt"
SIZE = (4 << 20) + 5
SOON = 10.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a MiB count as large."""
    for module in (replica_files, spare_prefetch):
        monkeypatch.setattr(module, "SMALL", 1 << 20)


class First:
    """The first agent of a round, which has a save of its own and answers the spare."""

    def __init__(self, folder: Path) -> None:
        self.slots = [Slot(folder / f"slot-{number}") for number in range(2)]
        for slot in self.slots:
            slot.path.mkdir(parents=True)
        replicas = ReplicaFiles(folder, set, set, lambda: False)
        parity = ParityFiles(folder, set, lambda: False)
        self.peers = AgentPeers(lambda directory: NodeMemory(folder, self.slots, replicas, parity))
        self.address = f"127.0.0.1:{self.peers.serve()}"
        self.peers.assume(PeerRound([Peer("first", "f", self.address, host="node1")], 0, SECRET))

    def save(self, step: int) -> None:
        """Have a save of one large file and two small ones become the common one, of which nobody has a copy."""
        slot, id = self.slots[step % 2].path, SaveId(1, step)
        slots.begin(slot, SlotBegin(id, frozenset({0})))
        files = {SHARDS: bytes([step]) * SIZE, STATES: b"r" * 10, COMMON: b"m" * 7}
        for name, data in files.items():
            (slot / name).write_bytes(data)
        details = {"world_size": 2, "rank": 1, "node": 1, "nodes": 2, "attempt": ATTEMPT}
        slots.commit(slot, 0, SlotDone(id, {name: len(data) for name, data in files.items()}, details))
        common = self.peers.common_saves(DIRECTORY)
        common.report(HeldReport("first", frozenset({id})))
        common.report(HeldReport("first", frozenset({id}), id, large=SIZE))


class Prefetched:
    """A spare, and the events of what it has prefetched."""

    def __init__(self, arenas: Path) -> None:
        self.arenas, self.events = arenas, list[dict[str, Any]]()
        self.settings = Settings(shm_dir=str(arenas), replicas="0")
        self.prefetch = SparePrefetch(self.settings, lambda directory: 0)

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "prefetched":
            self.events.append(event)

    def steps(self) -> list[int]:
        return [event["step"] for event in self.events]

    def staged(self) -> list[Path]:
        return [path for path in self.arenas.rglob("*") if path.name == SHARDS]

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < end, self.steps()
            time.sleep(0.01)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[First]:
    made = First(tmp_path / "first")
    yield made
    made.peers.close()


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Prefetched]:
    (tmp_path / "arenas").mkdir()
    made = Prefetched(tmp_path / "arenas")
    metrics.listen(made.hear)
    yield made
    metrics.unlisten(made.hear)
    made.prefetch.close()
    assert [*made.arenas.iterdir()] == []


def taken_over(spare: Prefetched, arena: Path) -> None:
    arena.mkdir(exist_ok=True)
    spare.prefetch.hand_over(DIRECTORY, arena, threading.RLock())


def test_what_is_prefetched_is_kept_for_another_node_once_the_spare_has_a_rank(
    first: First, spare: Prefetched, tmp_path: Path
):
    first.save(5)
    spare.prefetch.begin(lambda: first.address, SECRET)
    spare.until(spare.steps)
    arena = tmp_path / "arena"
    taken_over(spare, arena)
    (held,) = held_saves(arena, [])
    assert (held.id, held.attempt, held.slot, held.parts.keys()) == (SaveId(1, 5), ATTEMPT, None, {1})
    assert held.sizes == {SHARDS: SIZE, STATES: 10}  # what each node has comes from the others
    assert held.files[SHARDS].read_bytes() == bytes([5]) * SIZE and held.digests.keys() == {SHARDS, STATES}
    assert spare.events[0]["bytes"] == SIZE and spare.events[0]["host"] == "node1"


def test_a_newer_save_takes_the_place_of_one_that_was_prefetched_once_it_is_whole(
    first: First, spare: Prefetched, tmp_path: Path
):
    spare.prefetch.begin(lambda: first.address, SECRET)
    for step in (1, 2, 3):
        first.save(step)
        spare.until(lambda step=step: spare.steps()[-1:] == [step])
        assert [path.read_bytes()[0] for path in spare.staged()] == [step]
    taken_over(spare, tmp_path / "arena")
    (held,) = held_saves(tmp_path / "arena", [])
    assert held.id == SaveId(1, 3) and held.files[SHARDS].read_bytes() == bytes([3]) * SIZE
    assert [*spare.arenas.iterdir()] == []


def test_a_spare_that_waits_again_brings_nothing_twice(first: First, spare: Prefetched):
    first.save(1)
    for _ in range(2):
        spare.prefetch.begin(lambda: first.address, SECRET)
        time.sleep(1.0)
        assert spare.steps() == [1] and len(spare.staged()) == 1
    first.save(2)
    spare.until(lambda: spare.steps() == [1, 2])


def amid_the_second_save(first: First, spare: Prefetched) -> None:
    """Have one save prefetched, and the next on its way: two seconds at the limit that copies have are left of it."""
    first.save(1)
    spare.prefetch.begin(lambda: first.address, SECRET)
    spare.until(spare.steps)
    first.peers.rate = RateLimit(2e6)
    first.save(2)
    spare.until(lambda: [*spare.arenas.rglob(".new-*")])


def test_a_spare_that_has_a_rank_gives_up_what_is_on_its_way_at_once(first: First, spare: Prefetched, tmp_path: Path):
    """What was whole before stays: two seconds at the limit that copies have would be left."""
    amid_the_second_save(first, spare)
    begin = time.monotonic()
    taken_over(spare, tmp_path / "arena")
    assert time.monotonic() - begin < 0.5
    (held,) = held_saves(tmp_path / "arena", [])
    assert held.id == SaveId(1, 1) and held.files[SHARDS].read_bytes() == bytes([1]) * SIZE
    assert [*spare.arenas.rglob(".new-*")] == []


def test_a_source_that_dies_amid_a_file_leaves_what_was_whole_before(first: First, spare: Prefetched, tmp_path: Path):
    amid_the_second_save(first, spare)
    first.peers.close()
    spare.until(lambda: not [*spare.arenas.rglob(".new-*")])
    assert spare.steps() == [1] and [path.read_bytes()[0] for path in spare.staged()] == [1]


def test_a_damaged_file_is_not_prefetched_before_it_is_sound(first: First, spare: Prefetched):
    first.save(1)
    slot = first.slots[1].path
    slots.write_digests(slot, SaveId(1, 1), {SHARDS: "0" * 32})
    spare.prefetch.begin(lambda: first.address, SECRET)
    time.sleep(1.5)
    assert spare.steps() == [] and spare.staged() == []
    slots.write_digests(slot, SaveId(1, 1), {})
    spare.until(spare.steps)


def test_without_memory_for_two_slots_beside_nothing_is_prefetched_and_one_line_says_so(
    first: First, spare: Prefetched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    found = spare_prefetch.headroom(spare.arenas)
    free = 3 * (SIZE + 10) + 2 * 7 - 1
    monkeypatch.setattr(spare_prefetch, "headroom", lambda place: replace(found, free=free))
    spare.prefetch.begin(lambda: first.address, SECRET)
    for step in (1, 2):
        first.save(step)
        time.sleep(1.0)
    lines = [record.getMessage() for record in caplog.records if "prefetches nothing" in record.getMessage()]
    assert spare.steps() == [] and len(lines) == 1 and "node1" in lines[0] and "4.0 MiB" in lines[0]
    free += 1
    first.save(3)
    spare.until(spare.steps)


def test_a_spare_knows_who_has_the_secret(first: First, spare: Prefetched):
    first.save(1)
    spare.prefetch.begin(lambda: first.address, b"another")
    time.sleep(1.0)
    assert spare.steps() == [] and spare.staged() == []


def test_what_a_dead_spare_has_left_is_removed_by_the_next_one(first: First, spare: Prefetched):
    first.save(1)
    dead = SparePrefetch(spare.settings, lambda directory: 0)
    dead.begin(lambda: first.address, SECRET)
    spare.until(spare.steps)
    dead.end()
    for staged in dead._staged.values():
        staged.arena.release()  # as the kernel releases its lock
    (left,) = spare.arenas.iterdir()
    spare.prefetch.begin(lambda: "", SECRET)
    spare.until(lambda: not left.exists())


def test_files_that_are_kept_become_those_of_the_rank_that_is_taken(tmp_path: Path, first: First, spare: Prefetched):
    """Another rank takes none of them."""
    first.save(5)
    spare.prefetch.begin(lambda: first.address, SECRET)
    spare.until(spare.steps)
    arena, save = tmp_path / "arena", SaveName(DIRECTORY, SaveId(1, 5), ATTEMPT)
    taken_over(spare, arena)
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


@pytest.mark.parametrize("field", ["id", "attempt", "address", "host", "copies"])
def test_an_answer_without_a_field_is_refused(field: str):
    record = spare_prefetch.SaveAtRisk(SaveId(1, 2), ATTEMPT, "host:1", "host", 0).to_json()
    assert spare_prefetch.SaveAtRisk.from_json(record).to_json() == record
    del record[field]
    with pytest.raises(spare_prefetch.ProtocolError):
        spare_prefetch.SaveAtRisk.from_json(record)
