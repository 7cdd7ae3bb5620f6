"""Lays out the files of a torch.distributed.checkpoint (DCP) as its FileSystemWriter does, but for tensors' bytes."""

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastckpt._core.format.plan import Plan
from fastckpt._core.format.skeleton import MAX_COMMENT, Gap, Skeleton, sketch
from fastckpt._core.format.views import bytes_of, side_by_side

ALIGNMENT = 64
"""Bytes that each archive of a file begins at a multiple of, and so do the bytes of its tensor."""
GROWTH = 256
"""Bytes, at least, by which an archive of Python values may grow without moving later ones; large archives may grow by
a quarter."""
_END = b"PK\x05\x06"
_END_SIZE = 22
_SCANNED = 4096


class ShardLocation(NamedTuple):
    """The place of an item in its file, in bytes, as ``.metadata`` has it."""

    offset: int
    length: int


@dataclass(frozen=True)
class ShardPlan:
    """All that a save of one rank's file needs.

    Attributes:
        plan: The file.
        places: Positions of the items in it, in their order.
    """

    plan: Plan
    places: tuple[ShardLocation, ...]


class Archives(Skeleton):
    """A file of several archives, one after the other; nobody reads bytes after the last."""

    def padding(self, capacity: int) -> tuple[int, bytes]:
        """The offset and the bytes that make the file ``capacity`` bytes long."""
        return self.length, bytes(capacity - self.length)


Layout = tuple[torch.dtype, torch.Size]
"""All that the archive of a plain contiguous tensor depends on, but for its bytes."""


class Headers:
    """Archives of plain contiguous tensors without their bytes, each made once."""

    def __init__(self) -> None:
        self._known: dict[Layout, Skeleton] = {}

    def of(self, layout: Layout) -> Skeleton:
        """The archive of a tensor of this dtype and shape: it begins with the part before the tensor's bytes."""
        if layout not in self._known:
            dtype, shape = layout
            # Not torch.empty(shape): that writes to its memory if algorithms are to be deterministic.
            memory: torch.UntypedStorage = torch.UntypedStorage(shape.numel() * dtype.itemsize)  # type: ignore[no-untyped-call]
            self._known[layout], *_ = sketch(torch.empty(0, dtype=dtype).set_(memory).view(shape))
        return self._known[layout]


class ShardPlanner:
    """Plans the saves of one rank's ``.distcp`` file, and remembers where everything was the last time.

    Each tensor is an archive of its own, as torch.save writes it; its header depends on dtype and shape alone. Places
    stay from save to save as long as dtypes, shapes and their order do, and bytes fit into the room they have.
    """

    def __init__(self) -> None:
        self._headers = Headers()
        self._parts: list[Layout | int] = []
        self._archives = Archives((), 0, (), ())
        self._places: tuple[ShardLocation, ...] = ()

    def plan(self, items: Sequence[torch.Tensor | bytes], names: Sequence[str] = ()) -> ShardPlan:
        """Plan a save of these items, in this order.

        Args:
            items: Tensors on any device, and bytes. Only the elements of a tensor are saved, not the rest of its
                storage; bytes get room to grow if they are an archive of torch.save.
            names: Of the items, if their tensors may be copied later.
        """
        parts: list[Layout | int] = []
        storages: list[torch.UntypedStorage] = []
        tensors: list[torch.Tensor] = []
        indices: list[int] = []
        device = None
        for index, item in enumerate(items):
            plain = _plain(item) if isinstance(item, torch.Tensor) else item
            if isinstance(plain, bytes):
                room = self._room(index, plain)
                parts.append(room)
                storages.append(_storage(_padded(plain, room)))
                continue
            parts.append((plain.dtype, plain.shape))
            storages.append(bytes_of(plain))
            if names:
                tensors.append(plain)
                indices.append(index)
            if not plain.is_cpu:
                device = plain.device
        if parts != self._parts:
            self._lay_out(parts)
        paths = [names[index] for index in indices]
        return ShardPlan(Plan(self._archives, [], storages, tensors, indices, paths, device), self._places)

    def _room(self, index: int, data: bytes) -> int:
        last = self._parts[index] if index < len(self._parts) else None
        if not _can_grow(data):
            return len(data)
        if isinstance(last, int) and len(data) <= last <= len(data) + MAX_COMMENT and _is_found(len(data), last):
            return last
        growth = max(GROWTH, min(len(data) // 4, MAX_COMMENT // 2))
        return -(-(len(data) + growth) // GROWTH) * GROWTH

    def _lay_out(self, parts: list[Layout | int]) -> None:
        segments: list[tuple[int, bytes]] = []
        gaps, places, end = [], [], 0
        for part in parts:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if isinstance(part, int):
                gaps.append(Gap(start, part))
                end = start + part
            else:
                header = self._headers.of(part)
                segments += [(start + offset, data) for offset, data in header.segments]
                gaps += [Gap(start + gap.offset, gap.size) for gap in header.gaps]
                end = start + header.length
            places.append(ShardLocation(start, end - start))
        self._archives = Archives(tuple(segments), end, tuple(gaps), ())
        self._parts, self._places = parts, tuple(places)


def whole(data: bytes) -> Plan:
    """A plan of a file that begins with ``data``, such as a pickle: nobody reads bytes after its end."""
    return Plan(Archives(((0, data),), len(data), (), ()), [], [])


def _plain(tensor: torch.Tensor) -> torch.Tensor | bytes:
    """The tensor with its elements side by side; the whole archive of one that has more to it than elements."""
    plain = side_by_side(tensor)
    return _archive(tensor) if plain is None else plain


def _archive(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu(), buffer)
    return buffer.getvalue()


def _storage(data: bytes) -> torch.UntypedStorage:
    held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return held.untyped_storage()


def _can_grow(data: bytes) -> bool:
    """Return whether it is an archive that ends without a comment."""
    return data[-_END_SIZE:].startswith(_END) and data.endswith(b"\0\0")


def _is_found(length: int, room: int) -> bool:
    """Return whether torch finds the end of an archive in its room: it looks for that from the room's end backwards."""
    # miniz, in torch, reads 4096 bytes at a time, each time 4093 before the last, and none that would begin before 0.
    return length - _END_SIZE >= (max(0, room - _SCANNED) % (_SCANNED - 3))


def _padded(data: bytes, room: int) -> bytes:
    """The archive with a comment that makes it ``room`` bytes long."""
    return data if len(data) == room else data[:-2] + struct.pack("<H", room - len(data)) + bytes(room - len(data))
