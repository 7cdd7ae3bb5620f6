"""Copies the files of one checkpoint to storage, several at once and all under one limit."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fastckpt._core.io.direct import copy_file
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.io.rate import RateLimit

Item = TypeVar("Item")
Result = TypeVar("Result")

FILES_AT_ONCE = 4
"""One file alone keeps a local disk busy; more hide the latency of syncing small files and of remote disks."""


class CopyStopped(Exception):
    """This copy was given up since another of its checkpoint failed."""


class Copier:
    """The way to storage for the checkpoints of one node.

    Args:
        mbps: MB (10**6 bytes) per second that all files together may take; 0 for no limit.
        files_at_once: Number of files that are copied at the same time.
    """

    def __init__(self, mbps: float = 0.0, files_at_once: int = FILES_AT_ONCE) -> None:
        self._limit = RateLimit(mbps * 1e6) if mbps else None
        self._files_at_once = files_at_once

    def each(self, work: Callable[["Copy", Item], Result], items: Sequence[Item]) -> list[Result]:
        """Do ``work(copy, item)`` for all items, several at once; returns the results in the order of the items.

        The first failure makes all other copies stop at their next block; it is raised when all have ended.
        """
        copy = Copy(self._limit)
        # The with block waits for all threads: no copy may run on after its target was removed.
        with ThreadPoolExecutor(max(1, min(self._files_at_once, len(items))), "fastckpt-copy") as threads:
            futures = [threads.submit(copy.guard, work, item) for item in items]
        errors = [error for future in futures if (error := future.exception())]
        # The cause before its consequences: other copies raise CopyStopped because this one has failed.
        for error in sorted(errors, key=lambda error: isinstance(error, CopyStopped)):
            raise error
        return [future.result() for future in futures]


UNLIMITED = Copier()


class Copy:
    """The copies of one checkpoint: they go on together, or stop together."""

    def __init__(self, limit: RateLimit | None) -> None:
        self._limit = limit
        self._stop = threading.Event()

    def file(self, source: Path, target: Path, files: DirectoryRoot | None = None) -> tuple[int, str]:
        """`copy_file` at the pace of this checkpoint; raises CopyStopped when another copy of it has failed."""
        return copy_file(source, target, self, files=files)

    def guard(self, work: Callable[["Copy", Item], Result], item: Item) -> Result:
        """Do a part of the work; if it fails, the other parts stop."""
        try:
            # An item that no thread has begun yet is not begun any more.
            self._go_on_after(0)
            return work(self, item)
        except BaseException:
            self._stop.set()
            raise

    @property
    def portion(self) -> int | None:
        """Bytes to write between two calls of `wait_for`, at most; None for any number."""
        return self._limit.portion if self._limit else None

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` bytes may be written; raises CopyStopped if they no longer shall be."""
        self._go_on_after(self._limit.reserve(count) if self._limit else 0)

    def _go_on_after(self, seconds: float) -> None:
        # The pause of the rate limit is also where a copy notices that another one has failed.
        if self._stop.wait(seconds):
            raise CopyStopped
