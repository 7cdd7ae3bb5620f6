"""Makes room for images: checks that memory can hold them, reserves it, and ahead of time where it can."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary
from fastckpt._core.error_codes import coded
from fastckpt._core.memory.arena import Arena, too_small
from fastckpt._core.memory.headroom import Headroom, MemoryLimit, headroom
from fastckpt._core.memory.slots import discard, image_size, images_in
from fastckpt._core.policy.memory_reserve import ENOUGH, LEAST
from fastckpt._core.saver.peers.replica_room import ReplicaRoom
from fastckpt._core.saver.slot import Slot
from fastckpt.errors import ArenaTooSmall

logger = logging.getLogger("fastckpt")

Sizes = dict[str, int]
"""Names of images, and their sizes in bytes."""


class Reservations:
    """The memory of an arena's slots. All methods run in the saver's event loop; the work is a thread's.

    Args:
        arena: The arena.
        slots: Its slots; slots without room are given up.
        newest: Finds the slot with the newest whole checkpoint.
        replicas: Room that copies of other nodes' files need beside the slots.
    """

    def __init__(
        self, arena: Arena, slots: list[Slot], newest: Callable[[], Slot | None], replicas: ReplicaRoom
    ) -> None:
        self._arena, self._replicas = arena, replicas
        self._newest = newest
        self._slots = slots
        self._sizes: Sizes = {}
        self._present: dict[Slot, Sizes] = {}
        self._stale: dict[Slot, set[str]] = {}
        self._asked: dict[str, int] = {}
        # Two locks: `_lock` orders reservations, which take long; `_checking`
        # also lets `prepare` learn at once that memory is too small.
        self._lock = asyncio.Lock()
        self._checking = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, "fastckpt-reserve")
        self._ahead: set[asyncio.Task[None]] = set()
        self._under_way: Slot | None = None
        self._waiting = 0
        self._urgent = threading.Event()
        """Set while a save waits for memory, or the end of the job for this."""
        self._small: dict[tuple[Slot, str], None] = {}
        """Images with pages made in haste, oldest first."""
        self._guessed: dict[str, int] = {}
        self._warned = False

    def look_again(self) -> None:
        """Count the images again when their sizes are needed next: others may have removed some."""
        self._present.clear()

    def clear_away(self, slot: Slot, names: set[str]) -> None:
        """Have images of a slot that was begun removed before any writer is given it."""
        if names:
            self._stale.setdefault(slot, set()).update(names)

    async def check(self, sizes: Sizes) -> None:
        """See that all slots, or at least two, can hold these images beside those of other writers.

        Gives up a slot that is not needed if three leave others too little. Raises ArenaTooSmall.
        """
        # Each check awaits a thread when it drops a slot: a second one must not count memory that is being released.
        async with self._checking:
            await self._check(self._sizes | sizes)

    async def _check(self, sizes: Sizes) -> None:
        # Three slots let a save begin while one is persisted and
        # one is the newest; two still hold one whole checkpoint.
        size, short = sum(sizes.values()), ""
        self._replicas.ask(sizes)
        self._replicas.ask_disk()
        # Copies before a third slot: it saves a wait, they save state that storage lacks. But only with room for both.
        await self._replicas.settle(partial(self._lacking, size, LEAST, count=2))
        while (lacking := self._lacking(size, ENOUGH if (spare := self._spare()) else LEAST)) is not None:
            if spare is None:
                raise ArenaTooSmall(too_small(size, len(self._slots), lacking, self._replicas.needed))
            short = f"{lacking.medium} holds two slots only ({lacking}, less what is left to others)"
            self._slots.remove(spare)  # first: no save may take it
            self._present.pop(spare, None)
            self._stale.pop(spare, None)
            await asyncio.get_running_loop().run_in_executor(self._pool, self._arena.drop, spare.path)
        if short:
            logger.warning("%s", coded(short, "FC-001"))
        self._warn_if_crowded(size)
        self._sizes = sizes

    def _spare(self) -> Slot | None:
        """A slot that is not needed; None unless there are more than two."""
        spares = (slot for slot in reversed(self._slots) if self._is_spare(slot))
        return next(spares, None) if len(self._slots) > 2 else None

    def _warn_if_crowded(self, size: int) -> None:
        """Warn, once, if data loaders may find a tmpfs full: their workers die of that."""
        found = None if self._warned else self._lacking(size, ENOUGH)
        if found is not None and found.kind is MemoryLimit.TMPFS:
            self._warned, taken = True, len(self._slots) * size
            what = f"checkpoints take {binary(taken)} of {binary(found.total)} in {found.limit}"
            remedies = found.remedies(taken - found.free)
            text = coded("%s: data loaders with workers, which need some of it, may fail. %s.", "FC-001")
            logger.warning(text, what, remedies)

    def _lacking(self, size: int, share: int, count: int = 0) -> Headroom | None:
        """The limit that does not let every slot, or ``count`` slots, have ``size`` bytes; None if they can."""
        begun = self._arena.begun_bytes()  # before the limits are read: images made meanwhile must not count twice
        found = headroom(self._arena.path.parent, share)
        present = begun + sum(size for slot in self._slots for size in self._images_in(slot).values())
        # Images in the slots count as free: the new images take over their memory.
        found = replace(found, free=found.free + present + self._replicas.present)
        return found if (count or len(self._slots)) * size + self._replicas.needed > found.free else None

    def _images_in(self, slot: Slot) -> Sizes:
        """The images of a slot: those found by the first look, and changes that were made here since."""
        if slot not in self._present:
            self._present[slot] = images_in(slot.path)
        return self._present[slot]

    def _is_spare(self, slot: Slot) -> bool:
        return slot.id is None or (slot.committed and slot is not self._newest() and not slot.pins)

    async def reserve(self, slot: Slot, sizes: Sizes, writer: int = 0) -> None:
        """Have the images of a writer in ``slot``; raises ArenaTooSmall.

        If some have new names, images that it does not ask for any more make room.
        """
        # The fast path of every save but the first: stat of a few files, no lock, no thread.
        if _has(slot, sizes) and slot is not self._under_way and slot not in self._stale:
            return
        self._waiting += 1
        self._urgent.set()  # images that are reserved ahead now are then made in haste, too
        try:
            async with self._lock:
                await self._reserve(slot, sizes, writer)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._urgent.clear()

    async def _reserve(self, slot: Slot, sizes: Sizes, writer: int, *, ahead: bool = False) -> bool:
        """Have the images of a writer in a slot; False if that ended early, as it was ``ahead`` and a save waits."""
        self._under_way = slot
        try:
            # Old images go first: a state that has grown may not fit beside them.
            await self._make_way(slot, sizes, writer)
            self._asked |= dict.fromkeys(sizes, writer)
            await self.check(sizes)
            if slot not in self._slots:  # there is no room for as many
                return True
            if ahead and not await self._begin(slot, sizes):
                return False
            await self._make(slot, sizes, writer)
            return True
        finally:
            self._under_way = None

    def may_change(self, slot: Slot) -> bool:
        """Return whether images of a slot are being made or removed: files put there now could be replaced."""
        return slot is self._under_way or slot in self._stale

    def note(self, slot: Slot, sizes: Sizes, writer: int) -> None:
        """Take note of images that a slot gets of a writer that never asked for them: it has lent them."""
        self._asked |= dict.fromkeys(sizes, writer)
        self._present.get(slot, {}).update(sizes)

    async def _begin(self, slot: Slot, sizes: Sizes) -> bool:
        """Make pages for images that a slot does not have; False if a save waits: that one gets its turn at once."""
        for name, size in sizes.items():
            if image_size(slot.path, name) != size and not self._urgent.is_set():
                self._images_in(slot).pop(name, None)
                begin = partial(self._arena.begin, slot.path, name, size, self._urgent)
                await asyncio.get_running_loop().run_in_executor(self._pool, begin)
        return not self._urgent.is_set()

    async def _make(self, slot: Slot, sizes: Sizes, writer: int) -> None:
        loop = asyncio.get_running_loop()
        for name, size in sizes.items():
            self._images_in(slot).pop(name, None)  # as long as it is not there for certain
            with metrics.phase("arena.reserve", image=name):
                # In a thread: the kernel allocates every page that posix_fallocate
                # reserves, and the event loop must go on answering.
                reserve = partial(self._arena.reserve, slot.path, name, size, self._urgent)
                if not await loop.run_in_executor(self._pool, reserve):
                    self._small[slot, name] = None
            self._images_in(slot)[name] = size
        # A save asks first without sizes, while it is planned: that proves nothing about its files.
        left = [name for name in self._arena.begun_in(slot.path) if sizes and self._made_way(name, sizes, writer)]
        if left:  # it was guessed, or begun for a save that was itself quicker, and took another slot
            await loop.run_in_executor(self._pool, self._arena.abandon, slot.path, left)

    async def _make_way(self, slot: Slot, sizes: Sizes, writer: int) -> None:
        here, stale = self._images_in(slot), self._stale.pop(slot, set())
        is_new = not sizes.keys() <= here.keys()
        if is_new:
            stale |= {name for name in here if self._made_way(name, sizes, writer)}
        if stale:
            await asyncio.get_running_loop().run_in_executor(self._pool, discard, slot.path, stale)
            self._present[slot] = {name: size for name, size in here.items() if name not in stale}
        if is_new:
            self._forget(sizes, writer)

    async def prepare(self, sizes: Sizes, writer: int) -> None:
        """Reserve a writer's images in all empty slots in the background; raises ArenaTooSmall at once."""
        self._asked |= dict.fromkeys(sizes, writer)
        await self.check(sizes)
        self.reserve_ahead(sizes, writer)

    def guess(self, sizes: Sizes, writer: int) -> None:
        """Make pages in empty slots for images of about these sizes, if nothing is known and there is ample room."""
        if not self._asked and not self._guessed:
            self._guessed = dict.fromkeys(sizes, writer)
            self._run_ahead(self._begin_empty(sizes))

    async def _begin_empty(self, sizes: Sizes) -> None:
        for slot in list(self._slots):
            is_done = False
            while not is_done:
                async with self._lock:
                    # Once a writer has asked for images, their sizes are known; begun images serve for them.
                    is_free = (
                        slot in self._slots and slot.id is None and not sizes.keys() & self._images_in(slot).keys()
                    )
                    if self._asked or not is_free or self._lacking(sum(sizes.values()), ENOUGH):
                        return
                    try:
                        is_done = await self._begin(slot, sizes)
                    except OSError as error:
                        logger.debug("pages are not allocated ahead: %s", error)
                        return

    def _run_ahead(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)

    def _made_way(self, name: str, sizes: Sizes, writer: int) -> bool:
        """Return whether an image is of a writer that has others now. One that nobody asked for is of an ended job."""
        return name not in sizes and self._asked.get(name, self._guessed.get(name, writer)) == writer

    def _forget(self, sizes: Sizes, writer: int) -> None:
        self._sizes = {n: size for n, size in self._sizes.items() if not self._made_way(n, sizes, writer)}
        left = {name for slot in self._slots for name in self._images_in(slot)}
        self._asked = {n: owner for n, owner in self._asked.items() if n in left or n in self._sizes}

    def reserve_ahead(self, sizes: Sizes, writer: int = 0) -> None:
        """Reserve the images in all empty slots in the background; then make large pages of those made in haste."""
        if self._small or any(slot.id is None and not _has(slot, sizes) for slot in self._slots):
            self._run_ahead(self._reserve_empty(sizes, writer))

    async def _reserve_empty(self, sizes: Sizes, writer: int) -> None:
        try:
            # A copy of the list, because a check may drop a slot while this waits.
            for slot in list(self._slots):
                while not await self._reserve_if_empty(slot, sizes, writer):
                    pass  # the save that waited has the lock first
        except (ArenaTooSmall, OSError) as error:
            logger.warning("memory for the next save could not be reserved ahead: %s", error)
        await self._enlarge()

    async def _reserve_if_empty(self, slot: Slot, sizes: Sizes, writer: int) -> bool:
        async with self._lock:
            # No save has it meanwhile, and it was not given up.
            if slot in self._slots and slot.id is None and not _has(slot, sizes):
                return await self._reserve(slot, sizes, writer, ahead=True)
            return True

    async def _enlarge(self) -> None:
        """Have images that were made in haste in large pages: persists, resumes and maps then cost less."""
        while self._small and not self._urgent.is_set():
            slot, name = next(iter(self._small))
            enlarge = partial(self._arena.enlarge, slot.path, name, self._urgent)
            try:
                # In the thread that reserves: no image is replaced, nor a slot given up, meanwhile.
                is_done = await asyncio.get_running_loop().run_in_executor(self._pool, enlarge)
            except OSError:
                is_done = True  # it was removed
            if not is_done:
                return  # a save waits for the thread; the next one goes on here
            self._small.pop((slot, name), None)

    def close(self) -> None:
        """End the thread, after its present reservation."""
        for task in self._ahead:
            task.cancel()
        self._urgent.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _has(slot: Slot, sizes: Sizes) -> bool:
    return all(image_size(slot.path, name) == size for name, size in sizes.items())
