"""Makes room for images: checks that memory can hold them, reserves it, and ahead of time where it can."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from fastckpt import metrics
from fastckpt.engine.slot import Slot
from fastckpt.errors import ArenaTooSmall
from fastckpt.memory.arena import Arena, too_small
from fastckpt.memory.headroom import headroom

logger = logging.getLogger("fastckpt")

Sizes = dict[str, int]
"""Names of images, and their sizes in bytes."""


class Room:
    """The memory of an arena's slots. All methods run in the saver's event loop; the work is a thread's."""

    def __init__(self, arena: Arena, slots: list[Slot]) -> None:
        self._arena = arena
        self._slots = slots
        self._sizes: Sizes = {}
        self._lock = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, "fastckpt-reserve")
        self._ahead: set[asyncio.Task[None]] = set()

    def check(self, sizes: Sizes) -> None:
        """See that all slots, or at least two, can hold these images beside those of other writers.

        Gives up the third slot if there is no room for it. Raises ArenaTooSmall.
        """
        sizes = self._sizes | sizes
        free, count = headroom(self._arena.path), len(self._slots)
        present = sum(image.stat().st_size for slot in self._slots for image in slot.path.glob("*.pt"))
        while count * sum(sizes.values()) - present > free.free:
            if count == 2 or self._slots[-1].id is not None:
                raise ArenaTooSmall(too_small(self._arena.path, sum(sizes.values()), count, str(free)))
            count = 2
            logger.warning("shared memory holds two slots only (%s)", free)
            self._arena.make_slots(count)
            del self._slots[count:]
        self._sizes = sizes

    async def reserve(self, slot: Slot, sizes: Sizes) -> None:
        """Have the images in ``slot``; raises ArenaTooSmall."""
        if _has(slot, sizes):
            return
        loop = asyncio.get_running_loop()
        async with self._lock:
            self.check(sizes)
            for name, size in sizes.items():
                with metrics.phase("arena.reserve", image=name):
                    await loop.run_in_executor(self._pool, self._arena.reserve, slot.path, name, size)

    def reserve_ahead(self, sizes: Sizes) -> None:
        """Have the images in all slots that are empty, in a while."""
        if any(slot.id is None and not _has(slot, sizes) for slot in self._slots):
            task = asyncio.create_task(self._reserve_empty(sizes))
            self._ahead.add(task)
            task.add_done_callback(self._ahead.discard)

    async def _reserve_empty(self, sizes: Sizes) -> None:
        try:
            for slot in list(self._slots):
                if slot.id is None:
                    await self.reserve(slot, sizes)
        except (ArenaTooSmall, OSError) as error:
            logger.warning("a slot could not be made ready ahead of its save: %s", error)

    def close(self) -> None:
        """End the thread, after what it is reserving now."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _has(slot: Slot, sizes: Sizes) -> bool:
    try:
        return all((slot.path / name).stat().st_size == size for name, size in sizes.items())
    except FileNotFoundError:
        return False
