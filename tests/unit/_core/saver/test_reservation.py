"""Memory for images: reserving ahead of time never replaces an image of a save."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
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
from fastckpt.ddp import StorageType
from fastckpt.errors import ArenaTooSmall
from tests.e2e.ddp.conftest import Ranks, state
from tests.unit._core.memory.conftest import small_disk  # noqa: F401 (a fixture)

SmallDisk = Callable[[int], Path]

OLD, NEW = 1 << 20, 1 << 12
LARGE = 4 << 20


class SlowArena:
    """An arena that begins to reserve when it may."""

    def __init__(self, arena: Arena) -> None:
        self.path, self._arena = arena.path, arena
        self.reserved: list[tuple[str, int]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def begin(self, slot: Path, name: str, size: int, urgent: threading.Event) -> None:
        pass

    def begun_bytes(self) -> int:
        return 0

    def begun_in(self, slot: Path) -> list[str]:
        return []

    def reserve(self, slot: Path, name: str, size: int, urgent: threading.Event) -> bool:
        self.begun.set()
        assert self.go_on.wait(60)
        is_large = self._arena.reserve(slot, name, size, urgent)
        self.reserved.append((slot.name, size))
        return is_large


NO_COPIES = ReplicaRoom(lambda: 0, lambda: 0, CopiesFolder(Path("no arena")), is_optional=True)


def test_room_reserved_for_a_dead_worker_does_not_replace_an_image_of_a_save(tmp_path):
    """A worker of images of one size has died while room was made for it; its successor's are of another size."""
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(3)
    slots = [Slot(path) for path in arena.slots]
    slow = SlowArena(arena)

    async def restart() -> None:
        room = Reservations(slow, slots, lambda: None, NO_COPIES)
        room.reserve_ahead({"model.pt": OLD})
        await asyncio.get_running_loop().run_in_executor(None, slow.begun.wait)
        for slot in slots[:2]:
            slot.id = (1, 1)  # a save takes it
        grants = [asyncio.create_task(room.reserve(slot, {"model.pt": NEW})) for slot in slots[:2]]
        await asyncio.sleep(0.05)
        assert not any(grant.done() for grant in grants)
        slow.go_on.set()
        await asyncio.gather(*grants, *room._ahead)
        room.close()

    asyncio.run(restart())
    assert [images_in(slot.path) for slot in slots] == [{"model.pt": NEW}, {"model.pt": NEW}, {"model.pt": OLD}]
    assert slow.reserved.index((slots[0].path.name, OLD)) < slow.reserved.index((slots[0].path.name, NEW))
    assert (slots[1].path.name, OLD) not in slow.reserved
    arena.remove()


def test_a_save_whose_image_is_there_waits_for_no_other_slot(tmp_path):
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(3)
    slots = [Slot(path) for path in arena.slots]
    arena.reserve(slots[0].path, "model.pt", NEW)
    slow = SlowArena(arena)

    async def save() -> None:
        room = Reservations(slow, slots, lambda: None, NO_COPIES)
        room.reserve_ahead({"model.pt": NEW})
        await asyncio.get_running_loop().run_in_executor(None, slow.begun.wait)
        await room.reserve(slots[0], {"model.pt": NEW})
        assert slow.reserved == []
        slow.go_on.set()
        await asyncio.gather(*room._ahead)
        room.close()

    asyncio.run(save())
    assert slow.reserved == [(slot.path.name, NEW) for slot in slots[1:]]
    arena.remove()


class HastyArena:
    """An arena that makes pages in haste, and records what is asked of it."""

    def __init__(self, arena: Arena) -> None:
        self.path, self._arena = arena.path, arena
        self.calls: list[tuple[str, str, bool]] = []
        self.refusals = 0
        self.begin, self.begun_bytes = arena.begin, arena.begun_bytes
        self.begun_in, self.abandon = arena.begun_in, arena.abandon

    def reserve(self, slot: Path, name: str, size: int, urgent: threading.Event) -> bool:
        self._arena.reserve(slot, name, size, urgent)
        self.calls.append(("reserve", slot.name, urgent.is_set()))
        return not urgent.is_set()

    def enlarge(self, slot: Path, name: str, urgent: threading.Event) -> bool:
        self.calls.append(("enlarge", slot.name, urgent.is_set()))
        self.refusals -= 1
        return self.refusals < 0 and self._arena.enlarge(slot, name, urgent)


class TestHaste:
    """What a save waits for is made in haste, and in large pages afterwards; all else takes its time."""

    def test_the_first_save_alone_is_in_haste_and_its_image_is_made_large_last(self, tmp_path):
        arena, room = self.room(tmp_path)

        async def save() -> None:
            await room.reserve(room._slots[0], {"model.pt": NEW})
            room._slots[0].id = (1, 1)
            room.reserve_ahead({"model.pt": NEW})
            await asyncio.gather(*room._ahead)
            room.close()

        asyncio.run(save())
        ahead = [("reserve", "slot-1", False), ("reserve", "slot-2", False)]
        assert arena.calls == [("reserve", "slot-0", True), *ahead, ("enlarge", "slot-0", False)]

    def test_what_a_save_interrupted_is_made_large_after_the_next_one(self, tmp_path):
        arena, room = self.room(tmp_path)
        arena.refusals = 1

        async def save() -> None:
            await room.reserve(room._slots[0], {"model.pt": NEW})
            for slot in room._slots:
                slot.id = (1, 1)
            for _ in range(3):
                room.reserve_ahead({"model.pt": NEW})
                await asyncio.gather(*room._ahead)
            room.close()

        asyncio.run(save())
        assert [what for what, *_ in arena.calls] == ["reserve", "enlarge", "enlarge"]

    def test_an_image_that_was_removed_meanwhile_is_forgotten(self, tmp_path):
        _, room = self.room(tmp_path)

        async def save() -> None:
            await room.reserve(room._slots[0], {"model.pt": NEW})
            (room._slots[0].path / "model.pt").unlink()
            for slot in room._slots:
                slot.id = (1, 1)
            room.reserve_ahead({"model.pt": NEW})
            await asyncio.gather(*room._ahead)
            assert not room._small
            room.close()

        asyncio.run(save())

    def test_a_save_does_not_wait_for_what_another_slot_is_given_ahead(self, tmp_path):
        """It has its turn at once; then what was begun is completed."""
        arena, room = self.room(tmp_path)
        begun, begin = threading.Event(), arena.begin

        def slow(slot: Path, name: str, size: int, urgent: threading.Event) -> None:
            if not begun.is_set():
                begun.set()
                assert urgent.wait(60)
            begin(slot, name, size, urgent)

        arena.begin = slow

        async def save() -> None:
            room.reserve_ahead({"model.pt": NEW})
            await asyncio.get_running_loop().run_in_executor(None, begun.wait)
            room._slots[2].id = (1, 1)
            await room.reserve(room._slots[2], {"model.pt": NEW})
            assert arena.calls == [("reserve", "slot-2", True)]
            await asyncio.gather(*room._ahead)
            room.close()

        asyncio.run(save())
        assert arena.calls[1:3] == [("reserve", "slot-0", False), ("reserve", "slot-1", False)]
        assert [images_in(slot.path) for slot in room._slots] == [{"model.pt": NEW}] * 3
        assert arena.begun_bytes() == 0

    def test_a_save_that_takes_the_slot_for_files_of_other_names_removes_what_was_begun_there(self, tmp_path):
        """Names have the step in them, and a save comes while its slot is made ready for those of the one before."""
        arena, room = self.room(tmp_path)
        begun, begin = threading.Event(), arena.begin

        def slow(slot: Path, name: str, size: int, urgent: threading.Event) -> None:
            begun.set()
            assert urgent.wait(60)
            begin(slot, name, size, urgent)

        async def save() -> None:
            await room.reserve(room._slots[0], {"step_1/rank_0.pt": NEW})
            room._slots[0].id = (1, 1)
            arena.begin = slow
            room.reserve_ahead({"step_1/rank_0.pt": NEW})
            await asyncio.get_running_loop().run_in_executor(None, begun.wait)
            arena.begin = begin
            for number, slot in enumerate(room._slots[1:], 2):
                slot.id = (1, number)
                await room.reserve(slot, {f"step_{number}/rank_0.pt": NEW})
            await asyncio.gather(*room._ahead)
            room.close()

        asyncio.run(save())
        assert arena.begun_bytes() == 0
        assert [names_in(slot.path) for slot in room._slots] == [["step_1"], ["step_2"], ["step_3"]]

    def room(self, tmp_path: Path) -> tuple[HastyArena, Reservations]:
        arena = Arena.open(tmp_path / "arena", str(tmp_path))
        arena.make_slots(3)
        hasty = HastyArena(arena)
        return hasty, Reservations(hasty, [Slot(path) for path in arena.slots], lambda: None, NO_COPIES)


class TestGuess:
    """Pages are made ahead by what a training shows of its size; they count as free, and nobody else is pressed."""

    @pytest.fixture
    def place(self) -> Iterator[Path]:
        place = arena_path(os.environ["FASTCKPT_SHM_DIR"], "/checkpoints", 0)
        yield place
        shutil.rmtree(place)

    def test_images_of_other_sizes_take_the_pages_that_were_made(self, place):
        room = self.guessed(place, {"model.pt": LARGE})
        assert room._arena.begun_bytes() == 3 * LARGE

        async def save() -> None:
            await room.reserve(room._slots[0], {"model.pt": NEW, "rank_0.pt": NEW})
            room.reserve_ahead({"model.pt": NEW, "rank_0.pt": NEW})
            await asyncio.gather(*room._ahead)
            room.close()

        asyncio.run(save())
        assert room._arena.begun_bytes() == 0
        assert [images_in(slot.path) for slot in room._slots] == [{"model.pt": NEW, "rank_0.pt": NEW}] * 3

    def test_what_a_writer_does_not_ask_for_is_given_back(self, place):
        room = self.guessed(place, {"model.pt": LARGE})

        async def save() -> None:
            await room.reserve(room._slots[0], {"rank_1.pt": NEW}, writer=1)
            assert room._arena.begun_bytes() == 3 * LARGE  # another's
            for slot in room._slots:
                await room.reserve(slot, {"other.pt": NEW})
            room.close()

        asyncio.run(save())
        assert room._arena.begun_bytes() == 0
        assert not [*place.glob("slot-*/.begun-*")]

    def test_what_was_made_ahead_counts_as_free(self, place, monkeypatch):
        room = self.guessed(place, {"model.pt": LARGE})
        free = Headroom(0, 8 * LARGE, "the test's limit", MemoryLimit.HOST)
        monkeypatch.setattr(room_module, "headroom", lambda *_: free)
        asyncio.run(room.check({"model.pt": LARGE}))
        assert len(room._slots) == 3
        room.close()

    def test_nothing_is_made_ahead_without_ample_room(self, place, monkeypatch):
        free = Headroom(3 * LARGE - 1, 8 * LARGE, "the test's limit", MemoryLimit.HOST)
        monkeypatch.setattr(room_module, "headroom", lambda *_: free)
        room = self.guessed(place, {"model.pt": LARGE})
        assert room._arena.begun_bytes() == 0 and len(room._slots) == 3
        room.close()

    def test_nothing_is_made_ahead_beside_images(self, place):
        """Of an earlier launch, say: they stay as they are."""
        arena = Arena.open(place, "/checkpoints")
        arena.make_slots(3)
        for slot in arena.slots:
            arena.reserve(slot, "model.pt", NEW)
        arena.release()
        room = self.guessed(place, {"model.pt": LARGE})
        assert [images_in(slot.path) for slot in room._slots] == [{"model.pt": NEW}] * 3
        assert room._arena.begun_bytes() == 0
        room.close()

    def guessed(self, place: Path, sizes: dict[str, int]) -> Reservations:
        arena = Arena.open(place, "/checkpoints")
        arena.make_slots(3)
        room = Reservations(arena, [Slot(path) for path in arena.slots], lambda: None, NO_COPIES)

        async def guess() -> None:
            room.guess(sizes, 0)
            await asyncio.gather(*room._ahead)

        asyncio.run(guess())
        return room


def removals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which images are removed from now on, and the thread that does it."""
    found, unlink = [], os.unlink

    def noted(path, *, dir_fd=None):
        if str(path).endswith(".pt"):
            found.append((Path(path).name, threading.current_thread().name))
        return unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", noted)
    return found


def left_behind(ranks: Ranks, world: int) -> Path:
    """The arena of an owner that is gone, with a step in each slot."""
    ranks.start(world)
    for step in (1, 2, 3):
        for member in ranks.members:
            assert member.save_checkpoint(step, state(step), storage_type=StorageType.MEMORY)
    arena = ranks.members[0]._writer.link.arena
    kept = arena.with_name("kept")
    shutil.copytree(arena, kept)
    ranks.end()
    kept.rename(arena)
    return arena


class TestSlowWorkInAThread:
    """Memory is given back at about 5 GiB/s: meanwhile the saver answers others."""

    def test_images_of_former_writers_are_removed_in_a_thread(self, ranks: Ranks, monkeypatch):
        arena = left_behind(ranks, 2)
        (one,) = ranks.start()
        found = removals(monkeypatch)
        for step in (4, 5):
            assert one.save_checkpoint(step, state(step), storage_type=StorageType.MEMORY)
        assert [name for name, _ in found] == ["rank_1.pt"] * 2
        assert {thread.rpartition("_")[0] for _, thread in found} == {"fastckpt-reserve"}
        assert len(list(arena.glob("slot-*/rank_1.pt"))) == 1

    def test_a_slot_without_room_is_removed_in_a_thread(self, tmp_path, monkeypatch):
        arena = Arena.open(tmp_path / "arena", str(tmp_path))
        arena.make_slots(3)
        slots = [Slot(path) for path in arena.slots]
        for slot in slots:
            arena.reserve(slot.path, "model.pt", NEW)
        found = removals(monkeypatch)
        free = Headroom(2 * OLD, 4 * OLD, "the test's limit", MemoryLimit.HOST)
        monkeypatch.setattr(room_module, "headroom", lambda *_: free)

        async def save() -> None:
            room = Reservations(arena, slots, lambda: None, NO_COPIES)
            await room.reserve(slots[0], {"model.pt": OLD})
            room.close()

        asyncio.run(save())
        assert len(slots) == len(arena.slots) == 2
        assert found[0][0] == "model.pt" and found[0][1].startswith("fastckpt-reserve")
        assert sorted(path.name for path in arena.path.glob("slot-*")) == ["slot-0", "slot-1"]
        arena.remove()

    def test_all_memory_is_removed_in_a_thread_at_the_end(self, ranks: Ranks, monkeypatch):
        (one,) = ranks.start()
        for step in (1, 2, 3):
            one.save_checkpoint(step, state(step), storage_type=StorageType.DISK)
        found = removals(monkeypatch)
        ranks.end()
        assert len([name for name, _ in found if name == "model.pt"]) >= 3
        assert not {thread for _, thread in found} & {"fastckpt-saver"}

    def test_memory_of_a_removed_checkpoint_directory_is_removed_in_a_thread(self, ranks: Ranks, monkeypatch):
        left_behind(ranks, 1)
        shutil.rmtree(ranks.directory)
        found = removals(monkeypatch)
        (one,) = ranks.start()
        assert one.load_checkpoint() == {}
        assert found and not {thread for _, thread in found} & {"fastckpt-saver"}


def test_a_slot_in_the_middle_of_whose_removal_its_owner_died_is_gone(tmp_path, monkeypatch):
    """It is nobody's as soon as it is given up, and its memory is given back by whoever adopts the arena."""
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(3)
    for slot in arena.slots:
        arena.reserve(slot, "model.pt", NEW)
    last = arena.slots[-1]
    with monkeypatch.context() as dying:
        dying.setattr("fastckpt._core.memory.arena.shutil.rmtree", lambda _: None)
        arena.drop(last)
    assert slots_of(arena.path) == arena.slots and len(arena.slots) == 2
    arena.release()
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    assert not [path for path in arena.path.iterdir() if path.is_dir() and not path.name.startswith("slot-")]
    arena.remove()


# --- room for copies of other nodes' files


def with_copies(
    arena: Arena, copies: int, *, is_optional: bool, present: int = 0, disk: Path | None = None
) -> tuple[Reservations, ReplicaRoom]:
    folder = CopiesFolder(arena.path, disk)
    replicas = ReplicaRoom(lambda: copies, lambda: present, folder, is_optional=is_optional)
    return Reservations(arena, [Slot(path) for path in arena.slots], lambda: None, replicas), replicas


SHARD = 20 << 20
"""Bytes of a rank's shards. A copy of another node's takes as much, for each of two saves."""


@pytest.mark.parametrize(
    ("free", "name", "slots", "refused"),
    [
        (3 * SHARD + 2 * SHARD, "__0_0.distcp", 3, False),
        (3 * SHARD + 2 * SHARD - 1, "__0_0.distcp", 2, False),  # a third slot saves a wait, a copy a loss
        (2 * SHARD + 2 * SHARD - 1, "__0_0.distcp", 3, True),
        (3 * SHARD, "model.pt", 3, False),  # each node has it
    ],
)
def test_copies_come_before_a_third_slot_and_after_the_second(
    tmp_path, monkeypatch, free: int, name: str, slots: int, refused: bool
):
    monkeypatch.setattr(room_module, "headroom", lambda *_: Headroom(free, free, "it", MemoryLimit.HOST))
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(3)
    room, replicas = with_copies(arena, 1, is_optional=True)
    asyncio.run(room.check({name: SHARD}))
    assert (len(arena.slots), bool(replicas.refusal)) == (slots, refused)
    room.close()
    arena.remove()


def test_copies_that_were_asked_for_and_have_no_room_are_refused_before_the_first_save(tmp_path, monkeypatch):
    free = 4 * SHARD - 1
    monkeypatch.setattr(room_module, "headroom", lambda *_: Headroom(free, free, "it", MemoryLimit.HOST))
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(3)
    room, _ = with_copies(arena, 1, is_optional=False)
    with pytest.raises(
        ArenaTooSmall, match=r"2 x 20.0 MiB and 40.0 MiB of other hosts' copies, 80.0 MiB in all.*replicas 0"
    ):
        asyncio.run(room.check({"__0_0.distcp": SHARD}))
    present, _ = with_copies(arena, 1, is_optional=False, present=SHARD)
    asyncio.run(present.check({"__0_0.distcp": SHARD}))  # the memory of copies that have come is not needed twice
    for each in (room, present):
        each.close()
    arena.remove()


@pytest.mark.parametrize(("free", "asked"), [(0, []), (SHARD, [False]), (2 * SHARD, [False, True])])
def test_copies_of_an_earlier_round_make_way_for_slots_as_far_as_they_must(
    tmp_path, monkeypatch, free: int, asked: list[bool]
):
    """The copies of two saves are here, and nobody keeps any in this round: slots lack ``free`` bytes."""
    held, total, calls = [SHARD, SHARD], 4 * SHARD - free, list[bool]()

    def make_way(*, for_good: bool) -> None:
        calls.append(for_good)
        del held[0 if for_good else 1 :]

    monkeypatch.setattr(room_module, "headroom", lambda *_: Headroom(total - sum(held), total, "it", MemoryLimit.HOST))
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(2)
    folder = CopiesFolder(tmp_path / "arena")
    replicas = ReplicaRoom(lambda: 0, lambda: sum(held), folder, make_way, is_optional=True)
    room = Reservations(arena, [Slot(path) for path in arena.slots], lambda: None, replicas)
    asyncio.run(room.check({"__0_0.distcp": SHARD}))
    assert calls == asked
    room.close()
    arena.remove()


@pytest.mark.parametrize("is_optional", [True, False])
def test_copies_on_a_disk_ask_nothing_of_memory_and_the_disk_for_room(
    tmp_path: Path,
    small_disk: SmallDisk,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    is_optional: bool,
):
    free = 3 * SHARD  # in memory: enough for the slots alone
    monkeypatch.setattr(room_module, "headroom", lambda *_: Headroom(free, free, "it", MemoryLimit.HOST))
    large, small = small_disk(64), small_disk(32)
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(3)
    room, replicas = with_copies(arena, 1, is_optional=is_optional, disk=large)
    asyncio.run(room.check({"__0_0.distcp": SHARD}))
    assert len(arena.slots) == 3 and not replicas.refusal and replicas.needed == 0
    lacking, replicas = with_copies(arena, 1, is_optional=is_optional, disk=small)
    if is_optional:
        asyncio.run(lacking.check({"__0_0.distcp": SHARD}))
        assert "40.0 MiB" in replicas.refusal and str(small) in replicas.refusal
    else:
        with pytest.raises(ArenaTooSmall, match=rf"need 40.0 MiB: the disk under {small} has .*disk:DIR.*replicas 0"):
            asyncio.run(lacking.check({"__0_0.distcp": SHARD}))
    present, _ = with_copies(arena, 1, is_optional=False, present=SHARD, disk=small)
    asyncio.run(present.check({"__0_0.distcp": SHARD}))  # copies that have come have their room
    for each in (room, lacking, present):
        each.close()
    arena.remove()
