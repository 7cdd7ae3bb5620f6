"""Space of a file, given out one region after the other, so that each step writes it in sequence."""

import bisect
from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """Bytes of a file."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + self.size


class Regions:
    """Gives out regions of a file without overlap, each at the first free place after the one before it.

    Args:
        unit: Alignment of offsets and sizes.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        # Free intervals below the end, in order and without neighbours that touch: two lists for bisect.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._cursor = 0
        self.end = 0
        """The length of file that was given out so far."""
        self.used = 0
        """Bytes in regions that are not free."""

    def take(self, size: int) -> Region:
        """A region of at least that many bytes."""
        size = -(-size // self._unit) * self._unit
        # After the last region, else before it, else at the end of the file. Within a step nothing is freed before
        # backward, so that a step is written from one end to the other.
        index = self._fitting(size, self._cursor)
        if index is None:
            index = self._fitting(size, 0)
        region = Region(self._starts[index], size) if index is not None else self._grow(size)
        if index is not None:
            self._starts[index] += size
            if self._starts[index] == self._ends[index]:
                del self._starts[index], self._ends[index]
        self._cursor = region.end
        self.used += size
        return region

    def give_back(self, region: Region) -> None:
        """Free a region."""
        self.used -= region.size
        index = bisect.bisect(self._starts, region.start)
        joins_before = index > 0 and self._ends[index - 1] == region.start
        joins_after = index < len(self._starts) and self._starts[index] == region.end
        if joins_before and joins_after:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_before:
            self._ends[index - 1] = region.end
        elif joins_after:
            self._starts[index] = region.start
        else:
            self._starts.insert(index, region.start)
            self._ends.insert(index, region.end)
        if not self.used:
            self._cursor = 0

    def _fitting(self, size: int, least: int) -> int | None:
        first = bisect.bisect_left(self._starts, least)
        return next((i for i in range(first, len(self._starts)) if self._ends[i] - self._starts[i] >= size), None)

    def _grow(self, size: int) -> Region:
        start = self.end
        if self._ends and self._ends[-1] == self.end:  # the free tail is too short for it: lengthen that
            start = self._starts.pop()
            self._ends.pop()
        self.end = start + size
        return Region(start, size)
