"""Memory for images: reserving ahead of time never replaces an image of a save."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import Arena, slots_of
from fastckpt._core.memory.copies_folder import CopiesFolder
from fastckpt._core.memory.headroom import Headroom, MemoryLimit
from fastckpt._core.memory.slots import images_in
from fastckpt._core.saver import reservation as room_module
from fastckpt._core.saver.peers.replica_room import ReplicaRoom
from fastckpt._core.saver.reservation import Reservations
from fastckpt._core.saver.slot import Slot
from fastckpt.errors import ArenaTooSmall

OLD, NEW = 1 << 20, 1 << 12
SHARD = 20 << 20
"""Bytes of a rank's shards. A copy of another node's takes as much, for each of two saves."""
NO_COPIES = ReplicaRoom(lambda: 0, lambda: 0, CopiesFolder(Path("no arena")), is_optional=True)


@contextlib.contextmanager
def arena_of(path: Path, slots: int = 3) -> Iterator[Arena]:
    """An arena on a disk."""
    made = Arena.open(path, str(path.parent))
    made.make_slots(slots)
    yield made
    made.remove()


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with arena_of(tmp_path / "arena") as made:
        yield made


def room_in(arena: Arena, copies: ReplicaRoom = NO_COPIES) -> Reservations:
    return Reservations(arena, [Slot(path) for path in arena.slots], lambda: None, copies)


def free(monkeypatch: pytest.MonkeyPatch, found: int) -> None:
    limit = Headroom(found, found, "the test's limit", MemoryLimit.HOST)
    monkeypatch.setattr(room_module, "headroom", lambda *_: limit)


def test_room_reserved_for_a_dead_worker_does_not_replace_an_image_of_a_save(arena, monkeypatch):
    """A worker of images of one size has died while room was made for it; its successor's are of another size."""
    begun, go_on, sizes, reserve = threading.Event(), threading.Event(), list[tuple[str, int]](), arena.reserve

    def slowly(slot: Path, name: str, size: int, urgent: threading.Event) -> bool:
        begun.set()
        assert go_on.wait(60)
        sizes.append((slot.name, size))
        return reserve(slot, name, size, urgent)

    monkeypatch.setattr(arena, "begin", lambda *_: None)
    monkeypatch.setattr(arena, "reserve", slowly)
    room = room_in(arena)
    slots = room._slots

    async def restart() -> None:
        room.reserve_ahead({"model.pt": OLD})
        await asyncio.to_thread(begun.wait)
        for slot in slots[:2]:
            slot.id = (1, 1)  # a save takes it
        grants = [asyncio.create_task(room.reserve(slot, {"model.pt": NEW})) for slot in slots[:2]]
        await asyncio.sleep(0.05)
        assert not any(grant.done() for grant in grants)
        go_on.set()
        await asyncio.gather(*grants)
        await asyncio.gather(*room._ahead)
        room.close()

    asyncio.run(restart())
    assert [images_in(slot.path) for slot in slots] == [{"model.pt": NEW}, {"model.pt": NEW}, {"model.pt": OLD}]
    assert sizes.index(("slot-0", OLD)) < sizes.index(("slot-0", NEW))
    assert ("slot-1", OLD) not in sizes


def test_a_slot_in_the_middle_of_whose_removal_its_owner_died_is_gone(tmp_path, monkeypatch):
    """It is nobody's as soon as it is given up, and its memory is given back by whoever adopts the arena."""
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(3)
    for slot in arena.slots:
        arena.reserve(slot, "model.pt", NEW)
    with monkeypatch.context() as dying:
        dying.setattr("fastckpt._core.memory.arena.shutil.rmtree", lambda _: None)
        arena.drop(arena.slots[-1])
    assert slots_of(arena.path) == arena.slots and len(arena.slots) == 2
    arena.release()
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    assert not [path for path in arena.path.iterdir() if path.is_dir() and not path.name.startswith("slot-")]
    arena.remove()


class TestCopies:
    """Room for copies of other nodes' files."""

    def checked(
        self, arena: Arena, name: str = "__0_0.distcp", *, optional: bool, present: int = 0, disk: Path | None = None
    ) -> ReplicaRoom:
        """What is known of copies, after images were checked for."""
        replicas = ReplicaRoom(lambda: 1, lambda: present, CopiesFolder(arena.path, disk), is_optional=optional)
        room = room_in(arena, copies=replicas)
        try:
            asyncio.run(room.check({name: SHARD}))
        finally:
            room.close()
        return replicas

    def test_copies_come_before_a_third_slot_and_after_the_second(self, tmp_path: Path, monkeypatch):
        for there, name, slots, refused in (
            (3 * SHARD + 2 * SHARD, "__0_0.distcp", 3, False),
            (3 * SHARD + 2 * SHARD - 1, "__0_0.distcp", 2, False),  # a third slot saves a wait, a copy a loss
            (2 * SHARD + 2 * SHARD - 1, "__0_0.distcp", 3, True),
            (3 * SHARD, "model.pt", 3, False),  # each node has it
        ):
            free(monkeypatch, there)
            with arena_of(tmp_path / str(there)) as arena:
                replicas = self.checked(arena, name, optional=True)
                assert (len(arena.slots), bool(replicas.refusal)) == (slots, refused)

    def test_copies_that_were_asked_for_and_have_no_room_are_refused_before_the_first_save(self, arena, monkeypatch):
        free(monkeypatch, 4 * SHARD - 1)
        says = r"2 x 20.0 MiB and 40.0 MiB of other hosts' copies, 80.0 MiB in all.*replicas 0"
        with pytest.raises(ArenaTooSmall, match=says):
            self.checked(arena, optional=False)
        self.checked(arena, optional=False, present=SHARD)  # the memory of copies that have come is not needed twice

    def test_copies_of_an_earlier_round_make_way_for_slots_as_far_as_they_must(self, tmp_path: Path, monkeypatch):
        """The copies of two saves are here, and nobody keeps any in this round."""
        held, calls, total = list[int](), list[bool](), 0

        def make_way(*, for_good: bool) -> None:
            calls.append(for_good)
            del held[0 if for_good else 1 :]

        limit = lambda *_: Headroom(total - sum(held), total, "it", MemoryLimit.HOST)  # noqa: E731
        monkeypatch.setattr(room_module, "headroom", limit)
        for lacking, asked in ((0, []), (SHARD, [False]), (2 * SHARD, [False, True])):
            held[:], total = [SHARD, SHARD], 4 * SHARD - lacking
            with arena_of(tmp_path / str(lacking), slots=2) as arena:
                folder = CopiesFolder(arena.path)
                copies = ReplicaRoom(lambda: 0, lambda: sum(held), folder, make_way, is_optional=True)
                room = room_in(arena, copies)
                asyncio.run(room.check({"__0_0.distcp": SHARD}))
                room.close()
            assert calls == asked
            calls.clear()

    def test_copies_on_a_disk_ask_nothing_of_memory_and_the_disk_for_room(
        self, arena, small_disk: Callable[[int], Path], monkeypatch
    ):
        free(monkeypatch, 3 * SHARD)  # in memory: enough for the slots alone
        large, small = small_disk(64), small_disk(32)
        for optional in (True, False):
            replicas = self.checked(arena, optional=optional, disk=large)
            assert len(arena.slots) == 3 and not replicas.refusal and replicas.needed == 0
        refusal = self.checked(arena, optional=True, disk=small).refusal
        assert "40.0 MiB" in refusal and str(small) in refusal
        says = rf"need 40.0 MiB: the disk under {small} has .*disk:DIR.*replicas 0"
        with pytest.raises(ArenaTooSmall, match=says):
            self.checked(arena, optional=False, disk=small)
