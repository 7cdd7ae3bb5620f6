"""Copies the bytes of storages in the processor's memory to their places, on all cores that training leaves idle."""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fastckpt._core import metrics

PIECE = 32 << 20
"""Bytes that a thread copies at a time."""
FRESH_PIECE = 1 << 20
"""The same into memory that is not there yet: few enough that the pages are still cached when they are copied to."""
PAGE = 4096
MADV_POPULATE_WRITE = 23
SHARED_PIECE = 4 << 20
"""The same, where another thread may come to help."""
SMALL = 128 << 10
"""Below this many bytes a copy is over before another thread could have taken it."""

_address = ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value or 0
_signature = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_holding_gil = ctypes.PYFUNCTYPE(*_signature)(_address)
_madvise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(
    ("madvise", ctypes.CDLL(None))
)
copy_without_gil = ctypes.CFUNCTYPE(*_signature)(_address)
differ = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memcmp", ctypes.CDLL(None))
)
"""Whether so many bytes at two addresses are not the same; without the GIL."""


Copy = tuple[int, torch.UntypedStorage, int]
"""An address of this process, the storage whose bytes go there, and how many bytes."""

Span = tuple[int, int, int]
"""An address, the address of the bytes that go there, and how many they are."""


def idle_cores(workers: int) -> int:
    """The number of threads that each of ``workers`` may copy with while training waits: its share of cores, 1 to 16.

    Args:
        workers: Workers on this node that copy states of full size at the same time.
    """
    return max(1, min(16, len(os.sched_getaffinity(0)) // max(1, workers)))


class HostCopy:
    """Copies with a fixed number of threads, the caller's among them.

    With ``fresh``, the targets are memory that was never touched: their pages are then faulted in many at a time, which
    takes a third less than a fault for each.
    """

    def __init__(self, threads: int, *, fresh: bool = False) -> None:
        self._threads = max(1, threads)
        self._run = _run_fresh if fresh else _run
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, copies: Sequence[Copy]) -> None:
        """Do all ``copies``; returns when every byte has arrived."""
        with metrics.phase("fill.copy"):
            self._fill(copies)

    def _fill(self, copies: Sequence[Copy]) -> None:
        large: list[Span] = []
        for target, source, size in copies:
            if size < SMALL:
                _copy_holding_gil(target, source.data_ptr(), size)
            else:
                large.append((target, source.data_ptr(), size))
        self._copy_large(large)

    def _copy_large(self, spans: list[Span]) -> None:
        if self._threads == 1 or not threading.main_thread().is_alive():  # at exit, pools take no more work
            self._run(spans)
            return
        shares = _shares(spans, self._threads)
        self._pool = self._pool or ThreadPoolExecutor(self._threads - 1, "fastckpt-fill")
        others = [self._pool.submit(self._run, share) for share in shares[1:]]
        self._run(shares[0])
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class Backlog:
    """Copies from memory of the processor that are left to do, by whichever threads come, without the GIL.

    Args:
        copies: What to copy.
        compare: Called with each piece before and after its copy, and whether it is copied.
    """

    def __init__(
        self, copies: Sequence[Copy], compare: Callable[[Span, bool], None] = lambda piece, copied: None
    ) -> None:
        self._alive = copies
        self._compare = compare
        spans = [(target, source.data_ptr(), size) for target, source, size in copies]
        self._pieces = [
            (target + offset, source + offset, min(size - offset, SHARED_PIECE))
            for target, source, size in spans
            for offset in range(0, size, SHARED_PIECE)
        ]
        self._done = [False] * len(self._pieces)
        self._turns = iter(range(len(self._pieces)))

    def help(self) -> None:
        """Do what nobody has begun."""
        for turn in self._turns:
            self._copy(self._pieces[turn])
            self._done[turn] = True

    def finish(self) -> None:
        """Return when every byte has arrived; for one thread. What another has only begun is copied twice."""
        self.help()
        for piece, done in zip(self._pieces, self._done, strict=True):
            if not done:
                self._copy(piece)

    def _copy(self, piece: Span) -> None:
        self._compare(piece, False)
        copy_without_gil(*piece)
        self._compare(piece, True)


def _run(spans: list[Span]) -> None:
    for target, source, size in spans:
        copy_without_gil(target, source, size)


def _run_fresh(spans: list[Span]) -> None:
    for target, source, size in spans:
        for offset in range(0, size, FRESH_PIECE):
            start, piece = target + offset, min(FRESH_PIECE, size - offset)
            first = start // PAGE * PAGE
            _madvise(first, start + piece - first, MADV_POPULATE_WRITE)  # where it is refused, the copy faults
            copy_without_gil(start, source + offset, piece)


def _shares(spans: list[Span], count: int) -> list[list[Span]]:
    """Cut the spans into ``count`` lists of nearly as many bytes each."""
    shares: list[list[Span]] = [[] for _ in range(count)]
    total = sum(size for _, _, size in spans)
    done = 0
    for target, source, size in spans:
        offset = 0
        while offset < size:
            index = min(count - 1, done * count // max(1, total))
            end_of_share = -(-total * (index + 1) // count)
            piece = min(size - offset, PIECE, max(1, end_of_share - done))
            shares[index].append((target + offset, source + offset, piece))
            offset += piece
            done += piece
    return shares
