"""Moves the bytes of tensors to regions of a scratch file and back, in the thread that calls."""

import contextlib
import errno
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fastckpt._core.huge_pages import not_in_children
from fastckpt._core.io.unbuffered import UnbufferedWriter, read_some
from fastckpt._core.offload.gpudirect_storage import GpuDirectStorage
from fastckpt._core.offload.read_memory import ReadMemory
from fastckpt._core.offload.regions import Region
from fastckpt._core.offload.scratch_file import ScratchFile
from fastckpt._core.offload.staging import STAGING, StagingMemory, as_bytes, bytes_at
from fastckpt._core.transfer.host_copy import copy_without_gil

MOST_AT_ONCE = 32 << 20
"""Bytes of one read or write that needs no staging."""


ALIGNED = 64
"""Alignment of the addresses of torch's own memory, and so of all elements."""


@dataclass(frozen=True)
class Written:
    """Bytes in the file: ``size`` of them, ``head`` bytes after ``offset``."""

    offset: int
    head: int
    size: int


class RateMeter:
    """Bytes per second while at least one thread transfers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self.seconds = 0.0
        self.bytes = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._active:
                self._since = time.perf_counter()
            self._active += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._active -= 1
            if not self._active:
                self.seconds += time.perf_counter() - self._since

    def count(self, size: int) -> None:
        """Add bytes that were transferred."""
        with self._lock:
            self.bytes += size

    @property
    def rate(self) -> float:
        """Bytes per second so far; 0 before the first."""
        with self._lock:
            running = time.perf_counter() - self._since if self._active else 0.0
            return self.bytes / (self.seconds + running) if self.bytes else 0.0


class Transfers:
    """Transfers of one scratch file, for any number of threads.

    Bytes are written in whole units of the file: other bytes in these do not matter.
    """

    def __init__(self, file: ScratchFile) -> None:
        self._file = file
        self._writer = UnbufferedWriter(file.descriptor)
        self._staging = StagingMemory()
        self._memory = ReadMemory()
        self.gpudirect = GpuDirectStorage(file)
        self.written = RateMeter()
        self.read = RateMeter()

    @contextlib.contextmanager
    def beside_training(self, device: torch.device, ready: "torch.cuda.Event | None" = None) -> Iterator[None]:
        """Use a stream of this thread's own on a device, after an event of the training's stream."""
        if device.type == "cpu":
            yield
            return
        stream = self._staging.stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            if ready is not None:
                # By this thread, not in its stream: else the rate that is measured would be that of the computation.
                ready.synchronize()
            try:
                yield
            finally:
                # Also after an error: torch's allocator knows of no use in this stream, and gives memory to others.
                stream.synchronize()

    def use(self, tensor: torch.Tensor) -> None:
        """Have the memory of a tensor that was fetched stay until the stream of this thread has used it."""
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def give_back_memory(self) -> None:
        """Return memory of reads that is not used any more to the system."""
        self._memory.give_back()

    def room(self, size: int, parts: int) -> int:
        """Bytes of a region that are enough for so many parts of this size in all."""
        return size + 2 * parts * self._file.unit

    def write(self, parts: Sequence[torch.Tensor], region: Region) -> "list[Written]":
        """Write contiguous tensors, one after the other; returns where each is. Raises OSError."""
        offset, written = region.start, []
        with self.written:
            for part in parts:
                flat = as_bytes(part)
                head = self._write_host(flat, offset) if flat.device.type == "cpu" else self._write_device(flat, offset)
                written.append(Written(offset, head, flat.numel()))
                taken = self._units(head + flat.numel())
                offset += taken
                self.written.count(taken)
        return written

    def fetch(self, parts: "Sequence[Written]", device: torch.device) -> list[torch.Tensor]:
        """Read the bytes that `write` wrote into new memory. Raises OSError."""
        fetched = []
        with self.read:
            for part in parts:
                fetched.append(self._read_host(part) if device.type == "cpu" else self._read_device(part, device))
                self.read.count(self._units(part.head + part.size))
        return fetched

    def _units(self, size: int) -> int:
        return -(-size // self._file.unit) * self._file.unit

    def _write_host(self, flat: torch.Tensor, offset: int) -> int:
        """Write the pages that have these bytes; returns how far into the first one they begin."""
        address, size = flat.data_ptr(), flat.numel()
        head = address % self._file.unit
        # Whole pages are ours to read, also their parts before and after the bytes. Nothing is copied, and memory
        # that is freed meanwhile, as a gathered weight's may be, is an error of the call and not of the process.
        if self._file.unit == mmap.PAGESIZE and address % ALIGNED == 0:
            total = self._units(head + size)
            for done in range(0, total, MOST_AT_ONCE):
                view = bytes_at(address - head + done, min(MOST_AT_ONCE, total - done))
                self._writer.write(view, offset + done)
            return head
        buffer = self._staging.buffer(flat.device)
        for done in range(0, size, STAGING):
            count = min(STAGING, size - done)
            copy_without_gil(buffer.data_ptr(), address + done, count)
            self._writer.write(bytes_at(buffer.data_ptr(), self._units(count)), offset + done)
        return 0

    def _write_device(self, flat: torch.Tensor, offset: int) -> int:
        direct = 0
        with self.beside_training(flat.device):
            if cufile := self.gpudirect.tried(flat.device, offset):
                direct = flat.numel() // self._file.unit * self._file.unit
                torch.cuda.current_stream(flat.device).synchronize()  # cuFile knows of no stream
                cufile.write(flat[:direct], offset)
            buffer = self._staging.buffer(flat.device)
            for done in range(direct, flat.numel(), STAGING):
                count = min(STAGING, flat.numel() - done)
                # Synchronous: pinned memory is written to the file next.
                buffer[:count].copy_(flat[done : done + count])
                self._writer.write(bytes_at(buffer.data_ptr(), self._units(count)), offset + done)
        return 0

    def _read_host(self, part: "Written") -> torch.Tensor:
        """Read straight into whole pages of memory."""
        size = part.head + part.size
        memory = self._memory.take(self._units(size))
        address = memory.data_ptr()
        with not_in_children(address, self._units(size)):
            self._read_exactly(address, size, part.offset, MOST_AT_ONCE)
        return memory[part.head : size]

    def _read_device(self, part: "Written", device: torch.device) -> torch.Tensor:
        size, offset = part.size, part.offset
        with self.beside_training(device):
            # Memory of this stream; a user on another one records that with the allocator (`use`).
            memory = torch.empty(self._units(size), dtype=torch.uint8, device=device)
            if cufile := self.gpudirect.cufile:
                # Kernels of this memory's last tensor may be under way in this stream, and so may torch's fill of new
                # memory, if algorithms are to be deterministic.
                torch.cuda.current_stream(device).synchronize()
                cufile.read(memory, offset)
                return memory[:size]
            buffer = self._staging.buffer(device)
            for done in range(0, size, STAGING):
                count = min(STAGING, size - done)
                self._read_exactly(buffer.data_ptr(), count, offset + done, STAGING)
                memory[done : done + count].copy_(buffer[:count])
        return memory[:size]

    def _read_exactly(self, address: int, size: int, offset: int, most: int) -> None:
        """Read at least ``size`` bytes, in whole units: there is room for the last one."""
        done = 0
        while done < size:
            count = min(most, self._units(size - done))
            got = read_some(self._file.descriptor, bytes_at(address + done, count), offset + done)
            # Whole units were written, so less than one means that the file ends; a read that was cut short goes on.
            if got < self._file.unit:
                raise OSError(errno.EIO, f"the scratch file ends at {offset + done + got}, within a region of it")
            done += got // self._file.unit * self._file.unit
