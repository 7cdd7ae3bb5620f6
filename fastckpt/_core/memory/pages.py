"""Reserves the memory of a new file, in large pages as far as they come cheaply."""

import os
import time

from fastckpt._core.huge_pages import HUGE, is_in_memory, window

BUDGET = 0.5
"""Seconds of the processor per 10**9 bytes that asking for large pages may take: where memory is fragmented, the kernel
moves other pages out of the way for each of them. Faulting in as many small pages takes a worker about as long."""
PIECE = 32 * 2**20


def allocate(descriptor: int, size: int) -> None:
    """Give an empty file this size, and all the memory or disk for it; raises OSError if there is not enough.

    With large pages, which a tmpfs has, every later mapping of the file costs next to nothing, and what reads it
    through one, such as a persist, takes half of the processor's time.
    """
    os.ftruncate(descriptor, size)
    if is_in_memory(descriptor):
        _ask_for_large_pages(descriptor, size // HUGE * HUGE)
    os.posix_fallocate(descriptor, 0, size)


def _ask_for_large_pages(descriptor: int, size: int) -> None:
    deadline = time.thread_time() + BUDGET * size / 1e9
    for offset in range(0, size, PIECE):
        length = min(PIECE, size - offset)
        for page in range(offset, offset + length, HUGE):
            os.pwrite(descriptor, b"\0", page)  # one with nothing in it is not made large
        with window(descriptor, offset, length) as piece:
            piece.collapse()
        if time.thread_time() > deadline:
            return
