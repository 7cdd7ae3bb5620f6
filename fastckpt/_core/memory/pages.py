"""Reserves the memory of a new file, in large pages as far as they come cheaply, and makes pages large later."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from fastckpt._core.huge_pages import HUGE, is_in_memory, window

PATIENCE = 4.0
"""Seconds of the processor per 10**9 bytes that large pages may take where nobody waits for them.

Where memory is fragmented, the kernel moves other pages out of the way for each. The host of a virtual machine takes
back pages that were free for some seconds, and gives them one by one. Later each persist and each mapping is cheaper.
"""
BUDGET = 0.5
"""The same while a save waits: faulting in as many small pages takes about as long."""
PIECE = 32 * 2**20
_CACHED = 64 * 2**20
"""Bytes before the newest that `write_out` looks at again: they are on the disk by then."""
MOST_THREADS = 8
NEVER = threading.Event()


def allocate(descriptor: int, size: int, urgent: threading.Event = NEVER) -> bool:
    """Give a file that is empty, or was begun, this size, and all memory or disk for it.

    Raises OSError if there is not enough.

    With large pages, which a tmpfs has, every later mapping of the file costs next to nothing. A reader of the mapping,
    such as a persist, takes half of the processor's time.

    Args:
        descriptor: The file, open for reading and writing.
        size: Bytes.
        urgent: Set while somebody waits for the file: then all cores make its pages, and large ones only if these are
            no dearer. It may be set at any time.

    Returns:
        Whether large pages were asked for everywhere.
    """
    os.ftruncate(descriptor, size)
    asked = not is_in_memory(descriptor) or _Faults(descriptor, size // HUGE * HUGE, urgent).make()
    # Pages that the kernel has refused above are refused here, too, and reported; present ones cost nothing.
    os.posix_fallocate(descriptor, 0, size)
    return asked


def write_out(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes to a file on a disk; the kernel writes them out soon, and drops pages that it has written before.

    Else they would fill the page cache, and then keep every writer waiting for the disk. Raises OSError.
    """
    done = 0
    while done < len(data):
        with data[done:] as rest:
            done += os.pwrite(descriptor, rest, offset + done)
    start = max(0, offset - _CACHED)
    with contextlib.suppress(OSError):
        # It begins the write of dirty pages, and waits for none; it drops the memory of clean ones.
        os.posix_fadvise(descriptor, start, offset + done - start, os.POSIX_FADV_DONTNEED)


def begin(descriptor: int, size: int, urgent: threading.Event) -> None:
    """Make pages of a file that is to have about this size, until somebody waits; `allocate` makes the rest.

    Raises OSError if there is not enough memory.
    """
    os.ftruncate(descriptor, size)
    if is_in_memory(descriptor):
        _Faults(descriptor, size // HUGE * HUGE, urgent).begin()


def enlarge(descriptor: int, size: int, urgent: threading.Event) -> bool:
    """Move a file into large pages, as far as they are not; False if this ended early, as somebody waits.

    Others may read and write its mappings meanwhile. Pages that are pinned for a device stay as they are.
    """
    end, deadline = size // HUGE * HUGE, time.thread_time() + PATIENCE * size / 1e9
    for offset in range(0, end, PIECE):
        if urgent.is_set():
            return False
        with window(descriptor, offset, min(PIECE, end - offset)) as piece:
            piece.collapse()
        if time.thread_time() > deadline:
            break
    return True


class _Faults:
    """The first pages of a file, made piece by piece: by one thread as long as nobody waits, then by all cores."""

    def __init__(self, descriptor: int, size: int, urgent: threading.Event) -> None:
        self._descriptor, self._size, self._urgent = descriptor, size, urgent
        self._pieces: Iterator[int] = iter(range(0, size, PIECE))  # shared by threads: each `next` is atomic
        self._is_dear = False
        self._left = PATIENCE * size / 1e9

    def make(self) -> bool:
        """Make all; returns whether large pages were asked for everywhere."""
        self.begin()
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        if threads == 1 or not threading.main_thread().is_alive():  # at exit, pools take no more work
            self._make_rest()
        elif self._urgent.is_set():
            with ThreadPoolExecutor(threads, "fastckpt-pages") as pool:
                for work in [pool.submit(self._make_rest) for _ in range(threads)]:
                    work.result()
        return not self._is_dear

    def begin(self) -> None:
        """Make pieces until somebody waits."""
        while not self._urgent.is_set() and (offset := next(self._pieces, None)) is not None:
            self._make(offset)

    def _make_rest(self) -> None:
        for offset in self._pieces:
            self._make(offset)

    def _make(self, offset: int) -> None:
        length, is_urgent = min(PIECE, self._size - offset), self._urgent.is_set()
        with window(self._descriptor, offset, length) as piece:
            if self._is_dear:
                if is_urgent:
                    piece.populate()  # else `posix_fallocate` does it, for less, and later mappings the rest
                return
            start = time.thread_time()
            for page in range(offset, offset + length, HUGE):
                os.pwrite(self._descriptor, b"\0", page)  # one with nothing in it is not made large
            piece.collapse()
            spent = time.thread_time() - start
        self._left -= spent
        self._is_dear |= self._left < 0 or (is_urgent and spent > BUDGET * length / 1e9)
