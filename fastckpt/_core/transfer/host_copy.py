"""Copies the bytes of storages in host memory to their places, on all cores that training leaves idle."""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import compress, starmap
from operator import not_

import torch

PIECE = 32 << 20
"""Bytes that a thread copies at a time."""
FRESH_PIECE = 1 << 20
"""The same into memory without pages yet: few enough that the new pages are still cached when they are copied to."""
FRESH_SHARE = 16 << 20
"""Bytes of such memory that are worth another thread."""
PAGE = 4096
# Of madvise(2), since Linux 5.14; Python's mmap module has no name for it.
MADV_POPULATE_WRITE = 23
SHARED_PIECE = 1 << 20
"""The same, where another thread may help, and where a piece is compared with its copy: both are cached then."""
SPARE = 0.25
"""The part of the cores that training leaves idle where a copy may take one of them at once."""
SMALL = 128 << 10
"""Bytes below which a copy is over before another thread could have taken it."""

# ctypes releases the GIL around a call of CFUNCTYPE and keeps it in one of PYFUNCTYPE: for a small copy, taking it back
# would cost more than the copy.
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
"""Compare bytes at two addresses; not 0 if they differ. Runs without the GIL."""


Copy = tuple[int, torch.UntypedStorage, int]
"""An address of this process, the storage whose bytes to copy there, and their number."""

Span = tuple[int, int, int]
"""An address, the address of the bytes to copy there, and their number."""


def idle_cores() -> int:
    """The number of threads that a worker may copy with while training waits, 1 to 16."""
    # The affinity mask, not cpu_count: a launcher or a container may have bound this worker to fewer cores.
    return min(16, len(os.sched_getaffinity(0)))


def leaves_none(cores: int, passed: float, used: float) -> bool:
    """Return whether training that has used so many seconds of so many cores, while these passed, needs them all."""
    return cores - used / passed < SPARE * cores


class HostCopy:
    """Copies with a fixed number of threads, the caller's among them; with ``fresh`` as `fill_fresh` does."""

    def __init__(self, threads: int, *, fresh: bool = False) -> None:
        self._threads = max(1, threads)
        self._run = _run_fresh if fresh else _run
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, copies: Sequence[Copy]) -> None:
        """Make all ``copies``; returns when every byte has arrived."""
        if not copies:
            return
        targets, storages, sizes = zip(*copies, strict=True)
        sources = map(torch.UntypedStorage.data_ptr, storages)
        # Thousands of small tensors, such as an optimizer's step counters, are copied here in one go, by a loop in C.
        if max(sizes) < SMALL:
            deque(map(_copy_holding_gil, targets, sources, sizes), maxlen=0)
            return
        spans = [*zip(targets, sources, sizes, strict=True)]
        is_small = [*map(SMALL.__gt__, sizes)]
        deque(starmap(_copy_holding_gil, compress(spans, is_small)), maxlen=0)
        self._copy_large([*compress(spans, map(not_, is_small))])

    def _copy_large(self, spans: list[Span]) -> None:
        if self._threads == 1 or not threading.main_thread().is_alive():  # at exit, pools take no more work
            self._run(spans)
            return
        shares = _shares(spans, self._threads)
        self._pool = self._pool or ThreadPoolExecutor(self._threads - 1, "fastckpt-fill")
        others = [self._pool.submit(self._run, share) for share in shares[1:]]
        # The caller copies the first share itself: it would only wait otherwise.
        self._run(shares[0])
        for other in others:
            # Raises a thread's error, so a failed copy is never committed.
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def fill_fresh(copies: Sequence[Copy], threads: int) -> None:
    """Make copies with that many threads to memory that was never touched.

    Its pages are faulted in many at a time, which takes a third less than a fault for each.
    """
    # A small state is there before another thread has started, and restarted workers share the cores.
    threads = min(threads, 1 + sum(size for _, _, size in copies) // FRESH_SHARE)
    with closing(HostCopy(threads, fresh=True)) as filler:
        filler.fill(copies)


class Backlog:
    """Deferred copies from host memory, made without the GIL by all threads that call `help`.

    Args:
        copies: The copies.
        compare: Called with each piece before and after its copy, and whether it is copied.
    """

    def __init__(
        self, copies: Sequence[Copy], compare: Callable[[Span, bool], None] = lambda piece, copied: None
    ) -> None:
        self._alive = copies  # pieces are addresses alone: this keeps the storages
        self._compare = compare
        spans = [(target, source.data_ptr(), size) for target, source, size in copies]
        self._pieces = [
            (target + offset, source + offset, min(size - offset, SHARED_PIECE))
            for target, source, size in spans
            for offset in range(0, size, SHARED_PIECE)
        ]
        self._done = [False] * len(self._pieces)
        self._turns = iter(range(len(self._pieces)))  # `next` is atomic under the GIL: no piece has two turns

    def help(self) -> None:
        """Copy the pieces that no thread has begun."""
        # One iterator for all threads: the background thread and the one that waits for it take pieces in turn.
        for turn in self._turns:
            self._copy(self._pieces[turn])
            self._done[turn] = True

    def finish(self) -> None:
        """Return when every byte has arrived; for one thread. Pieces that another has only begun are copied twice."""
        self.help()
        # A helper that has begun a piece may be interrupted by a signal handler and never end it. Copying such a piece
        # again is safe, because both write the same bytes.
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
            # Faulting in and copying alternate, so that the copy finds
            # the pages that the kernel has just zeroed in the cache.
            start, piece = target + offset, min(FRESH_PIECE, size - offset)
            # madvise takes page-aligned addresses only; the first page may be there already, which does no harm.
            first = start // PAGE * PAGE
            _madvise(first, start + piece - first, MADV_POPULATE_WRITE)  # if it fails, the copy faults the pages in
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
            # Rounded up, so that the shares cover the last byte; cut
            # again at PIECE to keep each call of memmove bounded.
            end_of_share = -(-total * (index + 1) // count)
            piece = min(size - offset, PIECE, max(1, end_of_share - done))
            shares[index].append((target + offset, source + offset, piece))
            offset += piece
            done += piece
    return shares
