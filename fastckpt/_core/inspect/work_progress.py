"""Progress of long work on checkpoints, in bytes, reported to whoever shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class WorkObserver(Protocol):
    """Follows work that may take long. Its methods take no time, and raise nothing."""

    def begin(self, deed: str, total: int) -> None:
        """Take note that ``total`` bytes are to be worked through, for a deed such as "verify"; none are yet."""

    def advance(self, count: int) -> None:
        """Take note that ``count`` bytes more are done: some MiB, a file, or a tensor that was read by itself."""


class Unobserved:
    """Observer of work that nobody follows."""

    def begin(self, deed: str, total: int) -> None:
        """Do nothing."""

    def advance(self, count: int) -> None:
        """Do nothing."""


UNOBSERVED = Unobserved()


@contextmanager
def share_of(observer: WorkObserver, size: int) -> Iterator[Callable[[int], None]]:
    """One of several parts of the work, of ``size`` bytes: no more are reported, and no fewer once it is done.

    Bytes that are read twice, as tensors that share a storage, or never, as those of a file that is too short, would
    else move the end of the work. Gives the function to call with each number of bytes.
    """
    rest = size

    def advance(count: int) -> None:
        nonlocal rest
        count = min(count, rest)
        rest -= count
        observer.advance(count)

    yield advance
    observer.advance(rest)
