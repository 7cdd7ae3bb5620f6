"""Memory that activations are read into, used again and again: the first touch of a page costs more than its read."""

import ctypes
import mmap
import threading

import torch

from fastckpt._core.death_notes import DeathNotes
from fastckpt._core.huge_pages import HUGE, use_huge_pages

SPARE = 8
"""A block may be larger than its tensor by one part of so many."""


class ReadMemory:
    """Blocks of memory, each for one tensor after another; for any number of threads.

    A block is free when the last tensor in it dies, in whichever thread. Before another one is mapped, free ones of as
    many bytes go back to the system: there are never more bytes of blocks than were in use at one time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[_Block] = []
        # Tensors die in any thread, also within a call of ours that holds the lock.
        self._dead = DeathNotes[_Block]()

    def take(self, size: int) -> torch.Tensor:
        """Return at least that many bytes, which begin at a page."""
        with self._lock:
            block = self._fitting(size) or self._mapped(max(size, mmap.PAGESIZE))
        array = (ctypes.c_ubyte * block.size).from_address(block.address)
        # torch keeps the array as long as a tensor is in it, and that its memory: also when there is no owner any more.
        array.block = block  # type: ignore[attr-defined]
        self._dead.watch(array, block)
        return torch.frombuffer(array, dtype=torch.uint8)

    def give_back(self) -> None:
        """Return free blocks to the system."""
        with self._lock:
            self._bury()
            self._free.clear()

    @property
    def free(self) -> int:
        """Bytes of free blocks."""
        with self._lock:
            self._bury()
            return sum(block.size for block in self._free)

    def _fitting(self, size: int) -> "_Block | None":
        self._bury()
        fits = [block for block in self._free if size <= block.size <= size + size // SPARE]
        if not fits:
            return None
        block = min(fits, key=lambda each: each.size)
        self._free.remove(block)
        return block

    def _mapped(self, size: int) -> "_Block":
        given = 0
        while self._free and given < size:
            given += self._free.pop(0).size
        return _Block(size)

    def _bury(self) -> None:
        self._free.extend(self._dead.taken())


class _Block:
    """A private mapping that begins where a large page does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mapping = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.address = -(-start // HUGE) * HUGE
        use_huge_pages(self.address, size)
