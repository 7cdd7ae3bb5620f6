"""Room for images: what is made ahead of time never takes the place of what a save was given."""

import asyncio
import threading
from pathlib import Path

from fastckpt.engine.room import Room
from fastckpt.engine.slot import Slot
from fastckpt.memory.arena import Arena
from fastckpt.memory.slots import images_in

OLD, NEW = 1 << 20, 1 << 12


class SlowArena:
    """An arena that begins to reserve when it may."""

    def __init__(self, arena: Arena) -> None:
        self.path, self._arena = arena.path, arena
        self.reserved: list[tuple[str, int]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def reserve(self, slot: Path, name: str, size: int) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        self._arena.reserve(slot, name, size)
        self.reserved.append((slot.name, size))


def test_room_made_for_a_dead_worker_does_not_replace_the_image_of_a_save(tmp_path):
    """A worker of images of one size has died while room was made for it; its successor's are of another size."""
    arena = Arena.open(tmp_path / "arena", str(tmp_path))
    arena.make_slots(3)
    slots = [Slot(path) for path in arena.slots]
    slow = SlowArena(arena)

    async def restart() -> None:
        room = Room(slow, slots, lambda: None)
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
        room = Room(slow, slots, lambda: None)
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
