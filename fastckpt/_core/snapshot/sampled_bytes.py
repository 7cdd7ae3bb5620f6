"""Bytes drawn from storages at a save, with which their copies are compared before the save counts."""

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from fastckpt._core.transfer.device_copy import CopyPiece, bytes_of, host_buffer
from fastckpt._core.transfer.host_copy import SHARED_PIECE, Copy, Span, differ

LINE = 64
"""Bytes of each sample: a cache line."""
_SMALL = 64 << 10
"""Bytes of storages that are copied too fast for a write to meet that, but by chance."""
STRETCH = SHARED_PIECE // LINE
"""Lines of which one is sampled: those of a piece that is copied at a time, so that each piece has a sample."""

_draw = random.Random().random  # a generator apart: it neither follows a job's seeds nor changes its random numbers

TensorsOf = Callable[[torch.UntypedStorage], Sequence[torch.Tensor]]
"""The tensors in a storage that are saved."""


class SampledBytes:
    """64 bytes of each MiB of storages in host memory, as they are now, before these are copied.

    Each save draws its own places, so that none is left out for good. Of each tensor there is at least one. A write
    that is undone before the copy ends leaves no trace in the storages, only in their copies.

    Samples are also taken at both ends of a storage, and compared with each piece of it. A write of a whole tensor
    begins at its first byte, also if it tears less of the piece than is sampled.

    Args:
        copies: The copies to come.
        tensors_of: Gives the tensors in a storage.
    """

    def __init__(self, copies: Sequence[Copy], tensors_of: TensorsOf) -> None:
        self._taken: list[tuple[int, int, bytes, torch.UntypedStorage]] = []
        # By the addresses at which pieces begin, so that `compare` finds the samples of its piece at once.
        self._by_piece: dict[int, list[tuple[int, int, bytes, torch.UntypedStorage]]] = {}
        for target, storage, size in copies:
            start = storage.data_ptr()
            for place in _places(start, size, tensors_of(storage)):
                sample = ctypes.string_at(start + place, min(LINE, size - place))
                self._taken.append(taken := (start + place, target + place, sample, storage))
                self._by_piece.setdefault(start + place // SHARED_PIECE * SHARED_PIECE, []).append(taken)
            for place in (0, size - LINE) if size >= _SMALL else ():
                end = start + place, target + place, ctypes.string_at(start + place, LINE), storage
                self._taken.append(end)
                for piece in range(start, start + size, SHARED_PIECE):
                    self._by_piece[piece].append(end)
        self._differing: torch.UntypedStorage | None = None

    def compare(self, piece: Span, copied: bool) -> None:
        """Compare a part of a storage before and after it is copied; a difference counts from then on.

        This detects a write that begins or ends during the copy of the part, although it may tear less than is
        sampled. A write that begins and ends during that copy makes copy and storage differ: both are compared while
        they are still in the processor's cache.
        """
        target, start, size = piece
        part = self._by_piece.get(start)
        if self._differing is not None or not part:
            return
        # memcmp of newly copied bytes costs little: both sides are in the processor's cache.
        if copied and differ(target, start, size):
            self._differing = part[0][3]
        for source, _, sample, storage in part:
            if ctypes.string_at(source, len(sample)) != sample:
                self._differing = storage

    def differing_source(self) -> torch.UntypedStorage | None:
        """A storage that differs from its samples, or did in `compare`; None if there is none."""
        written = (
            storage for source, _, sample, storage in self._taken if ctypes.string_at(source, len(sample)) != sample
        )
        return next(written, self._differing)

    def differing_copy(self) -> torch.UntypedStorage | None:
        """A storage whose finished copy differs from its samples; None if there is none."""
        torn = (
            storage for _, target, sample, storage in self._taken if ctypes.string_at(target, len(sample)) != sample
        )
        return next(torn, None)


class SampledDeviceBytes:
    """The same of storages in the memory of one device, taken by the current stream in its order.

    The host does not wait for that: the samples are sent with the copies.

    Raises:
        torch.OutOfMemoryError: There is no room for them on the device.
    """

    def __init__(self, copies: Sequence[Copy], tensors_of: TensorsOf) -> None:
        self._compared: list[tuple[int, int, torch.UntypedStorage]] = []
        parts: list[torch.Tensor] = []
        for target, storage, size in copies:
            places = _places(storage.data_ptr(), size, tensors_of(storage)) if size else []
            lengths = [min(LINE, size - place) for place in places]
            self._compared += [(target + place, n, storage) for place, n in zip(places, lengths, strict=True)]
            parts += _lines(bytes_of(storage, size), places, lengths)
        # One tensor, so that all samples cross to the host in one copy.
        taken = torch.cat(parts)
        # Pinned where possible: a copy to pageable memory would make the host wait for the stream.
        self._arrived = host_buffer(taken.nbytes)
        self.piece = CopyPiece(self._arrived.data_ptr(), taken)

    def differing_copy(self) -> torch.UntypedStorage | None:
        """A storage whose finished copy differs from its samples, once these have arrived, too; None if none does."""
        start = self._arrived.data_ptr()
        for target, length, storage in self._compared:
            if ctypes.string_at(target, length) != ctypes.string_at(start, length):
                return storage
            start += length
        return None


def _lines(source: torch.Tensor, places: Sequence[int], lengths: Sequence[int]) -> Iterator[torch.Tensor]:
    """The bytes at these places, in order, in few tensors: each costs the launch of a kernel or a part of one."""
    whole = [place for place, length in zip(places, lengths, strict=True) if length == LINE]
    if len(whole) == len(places) > 2:  # one gather for all: rows of overlapping windows, without copying the storage
        rows = torch.tensor(places, device="cpu").to(source.device, non_blocking=True)
        yield source.unfold(0, LINE, 1).index_select(0, rows).view(-1)
    else:
        yield from (source[place : place + length] for place, length in zip(places, lengths, strict=True))


def _places(start: int, size: int, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Offsets of lines in a storage that begins at ``start``: one in each MiB, one of each tensor that is a part."""
    lines = -(-size // LINE)
    places = [LINE * (first + int(_draw() * min(STRETCH, lines - first))) for first in range(0, lines, STRETCH)]
    for tensor in tensors:
        if (tensor.nbytes < size or not tensor.is_contiguous()) and tensor.numel():
            element = sum(int(_draw() * n) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            places.append((tensor.data_ptr() + element * tensor.element_size() - start) // LINE * LINE)
    return places
