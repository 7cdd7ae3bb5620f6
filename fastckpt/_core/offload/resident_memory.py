"""Memory that saved storages take of a budget, and which of them may be dropped for others."""

import weakref

import torch

from fastckpt._core.death_notes import DeathNotes
from fastckpt._core.offload.saved_storage import Place, ResidentBytes, SavedStorage


class ResidentMemory:
    """Bytes of saved storages that are in memory: kept, on the way out, or fetched.

    Who calls holds one lock. Storages die in any thread, also within that lock: they are discounted later.

    Args:
        budget: Bytes that may be in memory.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.peak = 0
        """The most that were resident since this was last set to 0."""
        self._resident = 0
        self._dead = DeathNotes[ResidentBytes]()
        # Storages that may be dropped for one that is needed now: used ones, and those that were not used yet.
        self._used: dict[int, weakref.ref[SavedStorage]] = {}
        self._ahead: dict[int, weakref.ref[SavedStorage]] = {}

    @property
    def resident(self) -> int:
        """Bytes that are in memory."""
        for left in self._dead.taken():
            self._resident -= left.counted
        return self._resident

    def fits(self, size: int) -> bool:
        """Return whether so many bytes more are within the budget."""
        return self.resident + size <= self.budget

    def count(self, saved: SavedStorage) -> None:
        """Count a storage as resident."""
        if saved.resident is None:
            saved.resident = ResidentBytes()
            self._dead.watch(saved, saved.resident)
        saved.resident.counted = saved.size
        self._resident += saved.size
        self.peak = max(self.peak, self.resident)

    def discount(self, saved: SavedStorage) -> None:
        """Count a storage as resident no more."""
        if saved.resident is not None:
            self._resident -= saved.resident.counted
            saved.resident.counted = 0

    def read_ahead(self, saved: SavedStorage) -> None:
        """Note that a storage is in memory before it is needed: it may be dropped for one that is needed now."""
        self._ahead[id(saved)] = weakref.ref(saved)

    def use(self, saved: SavedStorage) -> None:
        """Note that a storage was used, after all others that were: it may be dropped, they before it."""
        self._ahead.pop(id(saved), None)
        self._used.pop(id(saved), None)
        self._used[id(saved)] = weakref.ref(saved)

    def drop(self, saved: SavedStorage) -> torch.Tensor | None:
        """Have a storage in the file alone; returns its memory."""
        memory, saved.memory = saved.memory, None
        saved.place = Place.STORED
        saved.handed = 0
        self._used.pop(id(saved), None)
        self._ahead.pop(id(saved), None)
        self.discount(saved)
        return memory

    def make_room(self, size: int, *, ahead: bool = False) -> bool:
        """Drop fetched storages that were used already, for another one; returns whether the budget has room.

        Those used first go first, and the one used last stays: a node unpacks several views of one storage one after
        another. With ``ahead`` that one may go, too, and those that were read ahead, the last ones first.
        """
        while len(self._used) > (not ahead) and not self.fits(size):
            self._drop_if_fetched(self._used.pop(next(iter(self._used))))
        while ahead and self._ahead and not self.fits(size):
            self._drop_if_fetched(self._ahead.popitem()[1])
        return self.fits(size)

    def _drop_if_fetched(self, ref: "weakref.ref[SavedStorage]") -> None:
        saved = ref()
        if saved is not None and saved.place in (Place.FETCHED, Place.REQUESTED):
            self.drop(saved)
