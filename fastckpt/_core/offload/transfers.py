"""Moves the bytes of tensors to regions of a scratch file and back, in the thread that calls."""

import contextlib
import errno
import threading
import time
from collections.abc import Iterator, Sequence

import torch

from fastckpt._core.io.unbuffered import UnbufferedWriter, read_some
from fastckpt._core.offload.regions import Region
from fastckpt._core.offload.scratch_file import ScratchFile
from fastckpt._core.offload.staging import STAGING, StagingMemory, as_bytes, bytes_at
from fastckpt._core.transfer.host_copy import copy_without_gil

MOST_AT_ONCE = 32 << 20
"""Bytes of one read or write that needs no staging."""


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

    Bytes are written in whole units of the file: what fills the last one is of no account.
    """

    def __init__(self, file: ScratchFile) -> None:
        self._file = file
        self._writer = UnbufferedWriter(file.descriptor)
        self._staging = StagingMemory()
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
                stream.wait_event(ready)
            yield
            stream.synchronize()

    def use(self, tensor: torch.Tensor) -> None:
        """Have the memory of a tensor that was fetched stay until the stream of this thread has used it."""
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def write(self, parts: Sequence[torch.Tensor], region: Region) -> int:
        """Write contiguous tensors, each from the next unit on; returns the bytes that took. Raises OSError."""
        offset = region.start
        with self.written:
            for part in parts:
                flat = as_bytes(part)
                if flat.device.type == "cpu":
                    self._write_host(flat, offset)
                else:
                    self._write_device(flat, offset)
                offset += self._units(flat.numel())
                self.written.count(self._units(flat.numel()))
        return offset - region.start

    def fetch(self, sizes: Sequence[int], region: Region, device: torch.device) -> list[torch.Tensor]:
        """Read what `write` wrote into new memory: bytes in tensors of these sizes. Raises OSError."""
        offset, parts = region.start, []
        with self.read:
            for size in sizes:
                if device.type == "cpu":
                    parts.append(self._read_host(size, offset))
                else:
                    parts.append(self._read_device(size, offset, device))
                offset += self._units(size)
                self.read.count(self._units(size))
        return parts

    def _units(self, size: int) -> int:
        return -(-size // self._file.unit) * self._file.unit

    def _write_host(self, flat: torch.Tensor, offset: int) -> None:
        address, size = flat.data_ptr(), flat.numel()
        done = 0
        if address % self._file.memory_alignment == 0:
            # Its whole units need no copy; the rest of the last one is not ours to read.
            whole = size // self._file.unit * self._file.unit
            while done < whole:
                count = min(MOST_AT_ONCE, whole - done)
                self._writer.write(bytes_at(address + done, count), offset + done)
                done += count
        buffer = self._staging.buffer(flat.device)
        while done < size:
            count = min(STAGING, size - done)
            copy_without_gil(buffer.data_ptr(), address + done, count)
            self._writer.write(bytes_at(buffer.data_ptr(), self._units(count)), offset + done)
            done += count

    def _write_device(self, flat: torch.Tensor, offset: int) -> None:
        buffer = self._staging.buffer(flat.device)
        with self.beside_training(flat.device):
            for done in range(0, flat.numel(), STAGING):
                count = min(STAGING, flat.numel() - done)
                # Synchronous: pinned memory is written to the file next.
                buffer[:count].copy_(flat[done : done + count])
                self._writer.write(bytes_at(buffer.data_ptr(), self._units(count)), offset + done)

    def _read_host(self, size: int, offset: int) -> torch.Tensor:
        """Read straight into new memory, from its first address that O_DIRECT takes."""
        room, alignment = self._units(size), self._file.memory_alignment
        memory = torch.empty(room + alignment, dtype=torch.uint8)
        start = -memory.data_ptr() % alignment
        self._read_exactly(memory.data_ptr() + start, size, offset, MOST_AT_ONCE)
        return memory[start : start + size]

    def _read_device(self, size: int, offset: int, device: torch.device) -> torch.Tensor:
        buffer = self._staging.buffer(device)
        with self.beside_training(device):
            # Memory of this stream; who uses it on another one says so to the allocator (`use`).
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            for done in range(0, size, STAGING):
                count = min(STAGING, size - done)
                self._read_exactly(buffer.data_ptr(), count, offset + done, STAGING)
                memory[done : done + count].copy_(buffer[:count])
        return memory

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
