"""A seekable file in memory that holds only written bytes, however large the gaps are."""

import bisect


class Sink:
    """The output of ``torch.save`` under ``skip_data``: headers and pickles, without the bytes of tensors.

    Read again, the gaps are zeros.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._chunks: list[bytearray] = []
        self._position = 0
        self.length = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write at the position; the writer of archives never goes back over its bytes."""
        if self._chunks and self._starts[-1] + len(self._chunks[-1]) == self._position:
            self._chunks[-1] += data
        else:
            self._starts.append(self._position)
            self._chunks.append(bytearray(data))
        self._position += len(data)
        self.length = max(self.length, self._position)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move as in a file."""
        self._position = offset + (0, self._position, self.length)[whence]
        self.length = max(self.length, self._position)
        return self._position

    def tell(self) -> int:
        """The position, in bytes."""
        return self._position

    def flush(self) -> None:
        """Do nothing: no bytes wait to be written."""

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes from the position."""
        start = self._position
        end = self.length if size < 0 else min(self.length, start + size)
        self._position = max(start, end)
        return self.cut(start, end)

    def readline(self) -> bytes:
        """Present because ``torch.load`` asks for it; an archive has no lines."""
        return self.read()

    def readinto(self, target: bytearray | memoryview) -> int:
        """Fill ``target`` from the position; how many bytes there were."""
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def cut(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` to ``end``."""
        found = bytearray(max(0, end - start))
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for begin, chunk in zip(self._starts[first:], self._chunks[first:], strict=True):
            if begin >= end:
                break
            low, high = max(begin, start), min(begin + len(chunk), end)
            if low < high:
                found[low - start : high - start] = chunk[low - begin : high - begin]
        return bytes(found)

    def segments(self) -> list[tuple[int, bytes]]:
        """All that was written, as offsets and bytes in ascending order."""
        return [(start, bytes(chunk)) for start, chunk in zip(self._starts, self._chunks, strict=True)]
