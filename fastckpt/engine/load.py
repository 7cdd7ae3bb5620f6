"""Loads a checkpoint's file with torch's own loader, into memory that belongs to the caller alone."""

import ctypes
import mmap
from pathlib import Path
from typing import Any, cast

import torch

from fastckpt.memory.fill import Copy, Filler

HUGE_PAGE = 2 << 20
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def load_copy(path: Path, threads: int, *, weights_only: bool) -> Any:
    """What ``torch.load(path)`` gives, on the CPU, for about the price of one copy.

    No tensor aliases the file: it may change once this returns. Tensors that shared a storage share one again, and
    storages are aligned as torch aligns them (64 bytes).

    Raises:
        Exception: Whatever torch.load raises for a file that it cannot read.
    """
    copies: list[Copy] = []
    fresh: list[torch.UntypedStorage] = []

    def into_fresh_memory(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
        target = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        _use_huge_pages(target)
        if storage.nbytes():
            copies.append((target.data_ptr(), storage, storage.nbytes()))
            fresh.append(target)
        return target

    # torch.load calls it with untyped storages; its annotation says otherwise
    locate = cast(Any, into_fresh_memory)
    state = torch.load(path, map_location=locate, mmap=True, weights_only=weights_only)
    filler = Filler(threads)
    try:
        filler.fill(copies)
    finally:
        filler.close()
    return state


def _use_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask for huge pages, where a storage spans some: they are faulted in several times faster."""
    start = -(-storage.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (storage.data_ptr() + storage.nbytes()) // HUGE_PAGE * HUGE_PAGE
    if end > start:
        _madvise(start, end - start, mmap.MADV_HUGEPAGE)  # advice: refusing it costs nothing
