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
"""Bytes of each of the buffers by way of which bytes are copied to memory that is not pinned."""
BUFFERS = 3
"""The number of buffers: bounded, and enough to fill one while another is emptied."""
ALIGNMENT = 256
"""Alignment in bytes of each copy within a device."""


class CopyPiece(NamedTuple):
    """An address of this process, and the bytes of a device to copy there, as a tensor."""

    target: int
    source: torch.Tensor


class Lane:
    """A stream that copies from one device, and buffers for copies to memory that is not pinned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)
        self._buffers: list[torch.Tensor] = []

    @contextlib.contextmanager
    def current(self) -> Iterator[torch.Stream]:
        """Make the stream and its device current for this thread; a stream alone would touch device 0 at its end."""
        with torch.accelerator.device_index(self.device.index), self.stream as stream:
            yield stream

    def send(self, pieces: Sequence[CopyPiece]) -> None:
        """Enqueue copies of pieces in the stream, which is current; to memory that is not pinned, by way of buffers."""
        staged = []
        for piece in pieces:
            # is_pinned asks the driver about the address: images are pinned by cudaHostRegister, of which torch's own
            # pinned allocator knows nothing.
            place = _bytes_at(piece.target, piece.source.nbytes)
            if place.is_pinned():
                place.copy_(piece.source, non_blocking=True)
            else:
                staged.append(piece)
        if staged:
            self._stage(staged)

    def _stage(self, pieces: Sequence[CopyPiece]) -> None:
        self._buffers = self._buffers or [host_buffer(STAGING) for _ in range(BUFFERS)]
        # A device writes asynchronously to pinned memory alone. So it fills pinned buffers in turn, while this thread
        # empties those that are full, the oldest first.
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
        # An event after these copies alone: synchronizing the stream would also wait for the batches behind it.
        self._filled = stream.record_event()

    def land(self) -> torch.Tensor:
        """Copy the pieces to their targets once the buffer is filled; returns the buffer, which is free again."""
        self._filled.synchronize()
        for target in self._targets:
            # Without the GIL, so that the training thread can launch its kernels meanwhile.
            copy_without_gil(*target)
        return self._buffer


class DeviceCopy:
    """Copies from one device that a thread runs while another trains, and waits only where it must.

    Args:
        lane: The stream and buffers to use.
        deferred: Copies of storages that do not change until `hold` was called.
        to_stage: Copies of storages that may change once this has returned: they are staged on the device before.
            Raises torch.OutOfMemoryError if there is no room.
        samples: Further pieces, sent after all others; the current stream has made them before.
    """

    def __init__(
        self,
        lane: Lane,
        deferred: Sequence[Copy],
        to_stage: Sequence[Copy] = (),
        samples: Sequence[CopyPiece] = (),
    ) -> None:
        self._lane = lane
        self._deferred = _pieces(deferred)
        # Staged first, then the event: whoever waits for the event sees staged bytes and computed samples.
        self._staged = [*_stage(_pieces(to_stage)), *samples]
        self._ready = torch.accelerator.current_stream(lane.device).record_event()
        self._read: torch.Event | None = None
        self._times: tuple[torch.Event, torch.Event] | None = None
        self._settled = threading.Event()

    def wait_until_staged(self) -> None:
        """Return when the staging is done: from then on any stream may change the storages that were staged."""
        self._ready.synchronize()

    def begin(self) -> None:
        """Enqueue all copies; those by way of buffers have arrived when this returns."""
        # The lane's stream waits for the training stream, which computes the storages and stages some.
        # Deferred storages come first, because `hold` waits for the event after them.
        with self._lane.current() as stream:
            begun = _timed(stream, after=self._ready)
            self._lane.send(self._deferred)
            self._read = stream.record_event()
            # Released as soon as the read of the deferred storages is enqueued: `hold` needs its event, not its end.
            self._settled.set()
            self._lane.send(self._staged)
            self._times = begun, _timed(stream)

    def finish(self, step: int = -1) -> None:
        """Return when all that `begin` sent has arrived.

        The time that the device took is ``device.copy`` of `metrics.seconds`.
        """
        assert self._times is not None
        begun, ended = self._times
        # The lane's stream is in order, so the event at its end covers everything sent.
        ended.synchronize()
        metrics.took("device.copy", _seconds(begun, ended), step=step)

    def close(self) -> None:
        """Release threads that wait in `hold`, and the storages once no copy is under way; also after a failure."""
        self._settled.set()
        with contextlib.suppress(RuntimeError):  # of a device that failed
            self._lane.stream.synchronize()
        self._deferred, self._staged = [], []

    def hold(self) -> None:
        """Have the current stream wait until the deferred storages were read; call it in each that writes to them.

        The host waits only until the reads are enqueued.
        """
        self._settled.wait()
        if self._read is not None:  # else `begin` has failed, and raised in its thread
            torch.accelerator.current_stream(self._lane.device).wait_event(self._read)


def batches(pieces: Sequence[CopyPiece], room: int) -> Iterator[list[CopyPiece]]:
    """The same bytes in lists that fit into ``room`` bytes, in order; larger pieces are cut."""
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
    """The lane of a device; None where torch has no streams or timed events for it, or does not count its memory."""
    try:  # everything that a copy will need, once: better to fail here than in the middle of a save
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
    """The first bytes of a storage, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]


def _stage(pieces: Sequence[CopyPiece]) -> list[CopyPiece]:
    """The same pieces, staged: the current stream copies them to other memory of the device."""
    if not pieces:
        return []
    # one allocation and few kernels, however many tensors there are
    ends, end = [], 0
    for _, source in pieces:
        ends.append(end := -(-end // ALIGNMENT) * ALIGNMENT + source.nbytes)
    # Freed to torch's allocator once the lane's copies are over: `close` synchronizes before it drops the pieces,
    # because the allocator knows of the training stream's use alone.
    memory = torch.empty(end, dtype=torch.uint8, device=pieces[0].source.device)
    places = [memory[end - each.source.nbytes : end] for each, end in zip(pieces, ends, strict=True)]
    copy_each(places, [source for _, source in pieces])
    return [CopyPiece(each.target, place) for each, place in zip(pieces, places, strict=True)]


def _bytes_at(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def host_buffer(size: int) -> torch.Tensor:
    """A tensor of ``size`` bytes in host memory, pinned where that is possible."""
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
