"""Samples of storages: each piece that is copied has some, and whatever differs in a piece is seen with that piece."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from fastckpt._core.snapshot.sampled_bytes import SampledBytes
from fastckpt._core.transfer.host_copy import SHARED_PIECE, Backlog, Copy, Span

SIZES = (1, 63, 64, 65, 5000, SHARED_PIECE - 1, SHARED_PIECE, SHARED_PIECE + 1, 3 * SHARED_PIECE + 777)
INVERSE = bytes(range(255, -1, -1))


class Copying:
    """Storages of these sizes, the memory that they are copied to, and their samples."""

    def __init__(self, *sizes: int) -> None:
        self.sources = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        self.targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.copies: list[Copy] = [
            (target.data_ptr(), source.untyped_storage(), source.numel())
            for target, source in zip(self.targets, self.sources, strict=True)
        ]
        self.samples = SampledBytes(self.copies, lambda storage: ())

    def run(self, disturb: Callable[[Span, bool], object], undo: Callable[[], object] = lambda: None) -> int | None:
        """Copy all; returns which storage differs.

        ``disturb`` is called with each piece before and after its copy, before the look at it, and ``undo`` after that.
        """

        def compare(piece: Span, copied: bool) -> None:
            disturb(piece, copied)
            self.samples.compare(piece, copied)
            undo()

        Backlog(self.copies, compare).finish()
        source = self.samples.differing_source()
        starts = [each.data_ptr() for each in self.sources]
        return None if source is None else starts.index(source.data_ptr())


def inverted(start: int, size: int) -> None:
    """Change each byte."""
    ctypes.memmove(start, ctypes.string_at(start, size).translate(INVERSE), size)


def pieces() -> Iterator[tuple[Copying, int, int]]:
    """Each piece of a storage of each size: its copying, where the piece begins, and its size."""
    for size in SIZES:
        for offset in range(0, size, SHARED_PIECE):
            yield Copying(size), offset, min(SHARED_PIECE, size - offset)


@pytest.mark.parametrize("copied", [False, True])
def test_a_write_at_the_begin_or_the_end_of_a_copy_is_seen_in_each_piece(copied: bool):
    """It is undone before the next look, so that neither the storage nor, at the end, the copy shows it."""
    for copying, offset, size in pieces():
        start, written = copying.sources[0].data_ptr() + offset, [0]

        def invert(start=start, size=size, written=written) -> None:
            inverted(start, size)
            written[0] += 1

        def disturb(piece: Span, now: bool, start=start, invert=invert) -> None:
            if piece[1] == start and now is copied:
                invert()

        def undo(written=written, invert=invert) -> None:
            if written[0] == 1:
                invert()

        assert copying.run(disturb, undo) == 0, (len(copying.sources[0]), offset)
        assert written == [2]
        assert torch.equal(copying.sources[0], copying.targets[0])


def test_a_byte_that_was_copied_otherwise_is_seen_in_each_piece():
    """As after a write that begins and ends during the copy of the piece: nothing in the storage shows it."""
    for copying, offset, size in pieces():
        target = copying.targets[0].data_ptr() + offset

        def disturb(piece: Span, copied: bool, target=target, place=target + size // 2) -> None:
            if copied and piece[0] == target:
                inverted(place, 1)

        assert copying.run(disturb) == 0, (len(copying.sources[0]), offset)


def test_a_copy_made_of_other_bytes_differs_from_the_samples_of_each_piece():
    """As after a swap that is undone: the storages are what they were, and each piece was compared with its copy."""
    for copying, offset, size in pieces():
        assert copying.run(lambda *_: None) is None
        inverted(copying.targets[0].data_ptr() + offset, size)
        assert copying.samples.differing_copy() is not None, (len(copying.sources[0]), offset)
