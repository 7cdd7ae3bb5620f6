"""Memory for images: reserving ahead of time never replaces an image of a save."""

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import Arena, arena_path, slots_of
from fastckpt._core.memory.copies_folder import CopiesFolder
from fastckpt._core.memory.headroom import Headroom, MemoryLimit
from fastckpt._core.memory.records import names_in
from fastckpt._core.memory.slots import images_in
from fastckpt._core.saver import reservation as room_module
from fastckpt._core.saver.peers.replica_room import ReplicaRoom
from fastckpt._core.saver.reservation import Reservations
from fastckpt._core.saver.slot import Slot
from fastckpt.errors import ArenaTooSmall

OLD, NEW = 1 << 20, 1 << 12
LARGE = 4 << 20
SHARD = 20 << 20
"""Bytes of a rank's shards. A copy of another node's takes as much, for each of two saves."""
NO_COPIES = ReplicaRoom(lambda: 0, lambda: 0, CopiesFolder(Path("no arena")), is_optional=True)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """An arena of three slots, on a disk."""
    made = Arena.open(tmp_path / "arena", str(tmp_path))
    made.make_slots(3)
    yield made
    made.remove()


def room_in(arena: Arena, watched: object = None, copies: ReplicaRoom = NO_COPIES) -> Reservations:
    return Reservations(watched or arena, [Slot(path) for path in arena.slots], lambda: None, copies)


def drive(room: Reservations, act: Callable[[], Awaitable[object]]) -> None:
    """Act, and see to the end of what is reserved ahead."""

    async def run() -> None:
        await act()
        await ahead(room)
        room.close()

    asyncio.run(run())


async def ahead(room: Reservations) -> None:
    await asyncio.gather(*room._ahead)


async def in_thread(wait: Callable[[], object]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, wait)


def free(monkeypatch: pytest.MonkeyPatch, found: int, total: int | None = None) -> None:
    limit = Headroom(found, total or found, "the test's limit", MemoryLimit.HOST)
    monkeypatch.setattr(room_module, "headroom", lambda *_: limit)


class WatchedArena:
    """An arena that records what is asked of it, makes pages in haste, and begins to reserve when it may."""

    def __init__(self, arena: Arena) -> None:
        self.path, self._arena = arena.path, arena
        self.calls: list[tuple[str, str, bool]] = []
        self.sizes: list[tuple[str, int]] = []
        self.begin, self.begun_bytes = arena.begin, arena.begun_bytes
        self.begun_in, self.abandon = arena.begun_in, arena.abandon
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def hold(self) -> None:
        """Make pages only when they are reserved, which waits."""
        self.begin, self.begun_bytes, self.begun_in = lambda *_: None, lambda: 0, lambda *_: []
        self.go_on.clear()

    def begin_when_urgent(self) -> None:
        """Have the first pages that are made ahead wait for a save."""
        begin = self.begin

        def slow(slot: Path, name: str, size: int, urgent: threading.Event) -> None:
            if not self.begun.is_set():
                self.begun.set()
                assert urgent.wait(60)
            begin(slot, name, size, urgent)

        self.begin = slow

    def reserve(self, slot: Path, name: str, size: int, urgent: threading.Event) -> bool:
        self.begun.set()
        assert self.go_on.wait(60)
        self._arena.reserve(slot, name, size, urgent)
        self.sizes.append((slot.name, size))
        self.calls.append(("reserve", slot.name, urgent.is_set()))
        return not urgent.is_set()

    def enlarge(self, slot: Path, name: str, urgent: threading.Event) -> bool:
        self.calls.append(("enlarge", slot.name, urgent.is_set()))
        return self._arena.enlarge(slot, name, urgent)


@pytest.fixture
def watched(arena: Arena) -> WatchedArena:
    return WatchedArena(arena)


@pytest.fixture
def room(arena: Arena, watched: WatchedArena) -> Reservations:
    return room_in(arena, watched)


def test_room_reserved_for_a_dead_worker_does_not_replace_an_image_of_a_save(watched, room):
    """A worker of images of one size has died while room was made for it; its successor's are of another size."""
    watched.hold()
    slots = room._slots

    async def restart() -> None:
        room.reserve_ahead({"model.pt": OLD})
        await in_thread(watched.begun.wait)
        for slot in slots[:2]:
            slot.id = (1, 1)  # a save takes it
        grants = [asyncio.create_task(room.reserve(slot, {"model.pt": NEW})) for slot in slots[:2]]
        await asyncio.sleep(0.05)
        assert not any(grant.done() for grant in grants)
        watched.go_on.set()
        await asyncio.gather(*grants)

    drive(room, restart)
    assert [images_in(slot.path) for slot in slots] == [{"model.pt": NEW}, {"model.pt": NEW}, {"model.pt": OLD}]
    assert watched.sizes.index(("slot-0", OLD)) < watched.sizes.index(("slot-0", NEW))
    assert ("slot-1", OLD) not in watched.sizes


class TestHaste:
    """What a save waits for is made in haste, and in large pages afterwards; all else takes its time."""

    def test_the_first_save_alone_is_in_haste_and_its_image_is_made_large_last(self, watched, room):
        async def save() -> None:
            await room.reserve(room._slots[0], {"model.pt": NEW})
            room._slots[0].id = (1, 1)
            room.reserve_ahead({"model.pt": NEW})

        drive(room, save)
        later = [("reserve", "slot-1", False), ("reserve", "slot-2", False)]
        assert watched.calls == [("reserve", "slot-0", True), *later, ("enlarge", "slot-0", False)]

    def test_a_save_that_takes_the_slot_for_files_of_other_names_removes_what_was_begun_there(self, watched, room):
        """Names have the step in them, and a save comes while its slot is made ready for those of the one before."""

        async def save() -> None:
            await room.reserve(room._slots[0], {"step_1/rank_0.pt": NEW})
            room._slots[0].id = (1, 1)
            watched.begun.clear()
            watched.begin_when_urgent()
            room.reserve_ahead({"step_1/rank_0.pt": NEW})
            await in_thread(watched.begun.wait)
            for number, slot in enumerate(room._slots[1:], 2):
                slot.id = (1, number)
                await room.reserve(slot, {f"step_{number}/rank_0.pt": NEW})

        drive(room, save)
        assert watched.begun_bytes() == 0
        assert [names_in(slot.path) for slot in room._slots] == [["step_1"], ["step_2"], ["step_3"]]


class TestGuess:
    """Pages are made ahead by what a training shows of its size; they count as free, and nobody else is pressed."""

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        made = Arena.open(arena_path(os.environ["FASTCKPT_SHM_DIR"], "/checkpoints", 0), "/checkpoints")
        made.make_slots(3)
        yield made
        shutil.rmtree(made.path)

    def guessed(self, arena: Arena) -> Reservations:
        room = room_in(arena)

        async def guess() -> None:
            room.guess({"model.pt": LARGE}, 0)
            await ahead(room)

        asyncio.run(guess())
        return room

    @pytest.mark.parametrize(("room_before", "made"), [(3 * LARGE, 3 * LARGE), (3 * LARGE - 1, 0)])
    def test_pages_are_made_ahead_with_ample_room_and_count_as_free(self, arena, monkeypatch, room_before, made):
        free(monkeypatch, room_before, 8 * LARGE)
        room = self.guessed(arena)
        assert arena.begun_bytes() == made
        free(monkeypatch, 0 if made else 3 * LARGE, 8 * LARGE)
        asyncio.run(room.check({"model.pt": LARGE}))
        assert len(room._slots) == 3
        room.close()


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

    @pytest.mark.parametrize(
        ("there", "name", "slots", "refused"),
        [
            (3 * SHARD + 2 * SHARD, "__0_0.distcp", 3, False),
            (3 * SHARD + 2 * SHARD - 1, "__0_0.distcp", 2, False),  # a third slot saves a wait, a copy a loss
            (2 * SHARD + 2 * SHARD - 1, "__0_0.distcp", 3, True),
            (3 * SHARD, "model.pt", 3, False),  # each node has it
        ],
    )
    def test_copies_come_before_a_third_slot_and_after_the_second(
        self, arena, monkeypatch, there: int, name: str, slots: int, refused: bool
    ):
        free(monkeypatch, there)
        replicas = self.checked(arena, name, optional=True)
        assert (len(arena.slots), bool(replicas.refusal)) == (slots, refused)

    def test_copies_that_were_asked_for_and_have_no_room_are_refused_before_the_first_save(self, arena, monkeypatch):
        free(monkeypatch, 4 * SHARD - 1)
        says = r"2 x 20.0 MiB and 40.0 MiB of other hosts' copies, 80.0 MiB in all.*replicas 0"
        with pytest.raises(ArenaTooSmall, match=says):
            self.checked(arena, optional=False)
        self.checked(arena, optional=False, present=SHARD)  # the memory of copies that have come is not needed twice

    @pytest.mark.parametrize(("lacking", "asked"), [(0, []), (SHARD, [False]), (2 * SHARD, [False, True])])
    def test_copies_of_an_earlier_round_make_way_for_slots_as_far_as_they_must(
        self, tmp_path, monkeypatch, lacking: int, asked: list[bool]
    ):
        """The copies of two saves are here, and nobody keeps any in this round."""
        held, total, calls = [SHARD, SHARD], 4 * SHARD - lacking, list[bool]()

        def make_way(*, for_good: bool) -> None:
            calls.append(for_good)
            del held[0 if for_good else 1 :]

        limit = lambda *_: Headroom(total - sum(held), total, "it", MemoryLimit.HOST)  # noqa: E731
        monkeypatch.setattr(room_module, "headroom", limit)
        arena = Arena.open(tmp_path / "arena", str(tmp_path))
        arena.make_slots(2)
        folder = CopiesFolder(arena.path)
        room = room_in(arena, copies=ReplicaRoom(lambda: 0, lambda: sum(held), folder, make_way, is_optional=True))
        asyncio.run(room.check({"__0_0.distcp": SHARD}))
        assert calls == asked
        room.close()
        arena.remove()

    @pytest.mark.parametrize("optional", [True, False])
    def test_copies_on_a_disk_ask_nothing_of_memory_and_the_disk_for_room(
        self, arena, small_disk: Callable[[int], Path], monkeypatch, optional: bool
    ):
        free(monkeypatch, 3 * SHARD)  # in memory: enough for the slots alone
        large, small = small_disk(64), small_disk(32)
        replicas = self.checked(arena, optional=optional, disk=large)
        assert len(arena.slots) == 3 and not replicas.refusal and replicas.needed == 0
        if optional:
            refusal = self.checked(arena, optional=True, disk=small).refusal
            assert "40.0 MiB" in refusal and str(small) in refusal
        else:
            with pytest.raises(
                ArenaTooSmall, match=rf"need 40.0 MiB: the disk under {small} has .*disk:DIR.*replicas 0"
            ):
                self.checked(arena, optional=False, disk=small)
