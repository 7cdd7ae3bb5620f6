"""Copies from the memory of an accelerator in a stream of their own, concurrently with its other streams."""

import contextlib
import ctypes
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fastckpt._core import metrics
from fastckpt._core.torch_private.tensors import copy_each
from fastckpt._core.transfer.device_memory import room
from fastckpt._core.transfer.host_copy import Copy, copy_without_gil

logger = logging.getLogger("fastckpt")

STAGING = 64 << 20
"""Bytes of each of the buffers through which bytes go to memory that is not pinned."""
BUFFERS = 3
"""How many there are: of what is bounded, one is filled while another is emptied."""
ALIGNMENT = 256
"""Bytes that each copy within a device begins at a multiple of."""


class CopyPiece(NamedTuple):
    """An address of this process, and the bytes of a device that go there, as a tensor of them."""

    target: int
    source: torch.Tensor


class Lane:
    """The way out of one device: a stream, and buffers for what goes to memory that is not pinned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)
        self._buffers: list[torch.Tensor] = []

    @contextlib.contextmanager
    def current(self) -> Iterator[torch.Stream]:
        """Have the stream, and its device, be those of this thread; a stream alone would touch device 0 at its end."""
        with torch.accelerator.device_index(self.device.index), self.stream as stream:
            yield stream

    def send(self, pieces: Sequence[CopyPiece]) -> None:
        """Have pieces copied by the stream, which is current; those to memory that is not pinned by way of buffers."""
        staged = []
        for piece in pieces:
            place = _bytes_at(piece.target, piece.source.nbytes)
            if place.is_pinned():
                place.copy_(piece.source, non_blocking=True)
            else:
                staged.append(piece)
        if staged:
            self._stage(staged)

    def _stage(self, pieces: Sequence[CopyPiece]) -> None:
        self._buffers = self._buffers or [host_buffer(STAGING) for _ in range(BUFFERS)]
        free, filling = list(self._buffers), deque[_Batch]()
        for batch in batches(pieces, STAGING):
            if not free:
                free.append(filling.popleft().land())
            filling.append(_Batch(batch, free.pop(), self.stream))
        for each in filling:
            each.land()


class _Batch:
    """Pieces on their way through a buffer."""

    def __init__(self, pieces: Sequence[CopyPiece], buffer: torch.Tensor, stream: torch.Stream) -> None:
        self._buffer = buffer
        self._targets: list[tuple[int, int, int]] = []
        offset = 0
        for target, source in pieces:
            size = source.nbytes
            buffer[offset : offset + size].copy_(source, non_blocking=True)
            self._targets.append((target, buffer.data_ptr() + offset, size))
            offset += size
        self._filled = stream.record_event()

    def land(self) -> torch.Tensor:
        """Copy the pieces to where they go; the buffer, which is free again."""
        self._filled.synchronize()
        for target in self._targets:
            copy_without_gil(*target)
        return self._buffer


class DeviceCopy:
    """Copies from one device that one thread runs, while another trains and is held only where it has to be.

    Args:
        lane: The way that they take.
        still: What stands still until `hold` was called.
        moving: What may change once this has returned: it is set aside within the device before. Raises
            torch.OutOfMemoryError if there is no room.
        samples: What else is sent, after all others; the current stream made it before.
    """

    def __init__(
        self,
        lane: Lane,
        still: Sequence[Copy],
        moving: Sequence[Copy] = (),
        samples: Sequence[CopyPiece] = (),
    ) -> None:
        self._lane = lane
        self._still = _pieces(still)
        self._moving = [*_set_aside(_pieces(moving)), *samples]
        self._ready = torch.accelerator.current_stream(lane.device).record_event()
        self._read: torch.Event | None = None
        self._times: tuple[torch.Event, torch.Event] | None = None
        self._settled = threading.Event()

    def wait_until_aside(self) -> None:
        """Return when what moves is set aside: it may be changed by other streams than the current one then."""
        self._ready.synchronize()

    def begin(self) -> None:
        """Have all sent; what goes by way of buffers has arrived then."""
        with self._lane.current() as stream:
            begun = _timed(stream, after=self._ready)
            self._lane.send(self._still)
            self._read = stream.record_event()
            self._settled.set()
            self._lane.send(self._moving)
            self._times = begun, _timed(stream)

    def finish(self, step: int = -1) -> None:
        """Return when all that `begin` sent has arrived.

        The device timed what it did: ``device.copy`` of `metrics.seconds`.
        """
        assert self._times is not None
        begun, ended = self._times
        ended.synchronize()
        metrics.took("device.copy", _seconds(begun, ended), step=step)

    def close(self) -> None:
        """Let go of who waits in `hold`, and, once nothing is copied any more, also after a failure, of the rest."""
        self._settled.set()
        with contextlib.suppress(RuntimeError):  # of a device that failed
            self._lane.stream.synchronize()
        self._still, self._moving = [], []

    def hold(self) -> None:
        """Have the current stream of this thread wait until what stands still was read; for each that writes to it."""
        self._settled.wait()
        if self._read is not None:  # else it failed, as `begin` says
            torch.accelerator.current_stream(self._lane.device).wait_event(self._read)


def batches(pieces: Sequence[CopyPiece], room: int) -> Iterator[list[CopyPiece]]:
    """The same bytes in lists that fit into ``room`` bytes, in order; what is larger is cut."""
    batch, left = list[CopyPiece](), room
    for target, source in pieces:
        offset = 0
        while offset < source.nbytes:
            size = min(left, source.nbytes - offset)
            batch.append(CopyPiece(target + offset, source[offset : offset + size]))
            offset, left = offset + size, left - size
            if not left:
                yield batch
                batch, left = [], room
    if batch:
        yield batch


def records_graph() -> bool:
    """Return whether this thread captures a CUDA graph instead of launching work."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def lane(device: torch.device) -> Lane | None:
    """The way out of a device; None where torch has no streams or timed events for it, or does not count its memory."""
    try:
        made = Lane(device)
        with made.current() as stream:
            begun, ended = _timed(stream), _timed(stream)
            ended.synchronize()
        _seconds(begun, ended)
        room(device)
    except (RuntimeError, KeyError) as error:
        logger.info("snapshots on %s are copied before a save returns: %s", device, error)
        return None
    return made


def copy_at_once(copies: Sequence[Copy]) -> None:
    """Copy from a device that has no `lane`; returns when all bytes have arrived."""
    for target, source in _pieces(copies):
        _bytes_at(target, source.nbytes).copy_(source)


def _pieces(copies: Sequence[Copy]) -> list[CopyPiece]:
    """The pieces to copy from storages on one device; none of an empty storage."""
    return [CopyPiece(target, bytes_of(storage, size)) for target, storage, size in copies if size]


def bytes_of(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    """The first bytes of a storage, as a tensor of them."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]


def _set_aside(pieces: Sequence[CopyPiece]) -> list[CopyPiece]:
    """The same, copied by the current stream to another place of the device's memory."""
    if not pieces:
        return []
    ends, end = [], 0
    for _, source in pieces:
        ends.append(end := -(-end // ALIGNMENT) * ALIGNMENT + source.nbytes)
    memory = torch.empty(end, dtype=torch.uint8, device=pieces[0].source.device)
    places = [memory[end - each.source.nbytes : end] for each, end in zip(pieces, ends, strict=True)]
    copy_each(places, [source for _, source in pieces])
    return [CopyPiece(each.target, place) for each, place in zip(pieces, places, strict=True)]


def _bytes_at(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def host_buffer(size: int) -> torch.Tensor:
    """So many bytes of the processor's memory, pinned where that is possible."""
    with contextlib.suppress(RuntimeError):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _timed(stream: torch.Stream, after: torch.Event | None = None) -> torch.Event:
    """An event in a stream, ``after`` another."""
    if after is not None:
        stream.wait_event(after)
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def _seconds(begun: torch.Event, ended: torch.Event) -> float:
    return begun.elapsed_time(ended) / 1e3
