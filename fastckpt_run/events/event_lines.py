"""Lines of events in memory, compressed but for the newest: a job that restarts often has many, and much alike."""

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

PACKED = 512
"""Lines that are compressed together."""


class EventLines(Sequence[bytes]):
    """Lines that end with a newline, and have no other; one thread at a time appends, others may read meanwhile."""

    def __init__(self) -> None:
        # One pair, which is replaced as a whole: a reader has each line once.
        self._parts: tuple[list[bytes], list[bytes]] = [], []

    def append(self, line: bytes) -> None:
        """Add a line."""
        packed, newest = self._parts
        newest.append(line)
        if len(newest) >= 2 * PACKED:
            self._parts = [*packed, zlib.compress(b"".join(newest[:PACKED]))], newest[PACKED:]

    def __len__(self) -> int:
        packed, newest = self._parts
        return len(packed) * PACKED + len(newest)

    def __iter__(self) -> Iterator[bytes]:
        return self._since(0)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, int):
            return next(self._since(range(len(self))[at]))
        first, end, step = at.indices(len(self))
        return [*islice(self._since(first), 0, max(0, end - first), step)] if step > 0 else [*self][at]

    def _since(self, first: int) -> Iterator[bytes]:
        """The lines from one on."""
        packed, newest = self._parts
        for number in range(first // PACKED, len(packed)):
            lines = zlib.decompress(packed[number]).splitlines(keepends=True)
            yield from lines[max(0, first - number * PACKED) :]
        yield from newest[max(0, first - len(packed) * PACKED) :]
