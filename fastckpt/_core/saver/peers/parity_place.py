"""A place for new parity: chunks of the other members of a group come in pieces, and go into its XOR.

A piece goes into the XOR once it is whole and its digest was compared: so half of one is never in it. The pieces of
each member in it are remembered, because the same piece twice would take it out again.
"""

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.ids import SaveId
from fastckpt._core.huge_pages import is_in_memory
from fastckpt._core.memory.pages import allocate, write_out
from fastckpt._core.memory.parity_records import Files, ParityMember, ParityRecord, write_parity
from fastckpt._core.saver.peers.file_transfer import ON_DISK
from fastckpt.errors import ArenaTooSmall, FastckptError, ProtocolError


class ParityPlace:
    """A place that receives chunks; any thread may add a piece.

    Args:
        path: The directory of the place.
        id: The save.
        record: Record of the place; it grows.
        descriptor: The block; this object closes it.
        allocated: Bytes of the block that have memory.
    """

    def __init__(self, path: Path, id: SaveId, record: ParityRecord, descriptor: int, allocated: int) -> None:
        self.path, self.id, self.record = path, id, record
        self._descriptor, self._allocated, self._filled = descriptor, allocated, 0
        self._is_growing = False
        self._lock = threading.Lock()

    def missing(self, member: str) -> int:
        """The number of the first piece of a member that is not in the XOR."""
        with self._lock:
            return len(self.record.members[member].digests)

    def expect(self, member: str, files: Files) -> None:
        """Take note of the files of a member.

        Raises ProtocolError if they were others before, ArenaTooSmall if they are more than a record holds.
        """
        with self._lock:
            if self.record.members.setdefault(member, ParityMember(files)).files != files:
                raise ProtocolError(f"{member} had other files of {self.id} before")
            self.record.demand_short(member)

    def lacks(self, size: int) -> bool:
        """Return whether memory for so many bytes is still to be allocated."""
        with self._lock:
            return size > self._allocated

    def grow(self, size: int, demand_room: Callable[[int], None]) -> None:
        """Have memory for so many bytes; one thread at a time calls it, while others add pieces.

        Args:
            size: Bytes.
            demand_room: Called with the bytes of memory that are to come; raises ArenaTooSmall if they are not there.
        """
        with self._lock:
            if size <= self._allocated or self._descriptor < 0:
                return
            # One of its own: the place may be released meanwhile, and the number be another file's then.
            allocated, descriptor, self._is_growing = self._allocated, os.dup(self._descriptor), True
        try:
            with metrics.phase("parity.allocate", step=self.id.step):
                demand_room(size - allocated)
                if allocated:  # `allocate` writes to its bytes: here they have chunks in them
                    os.posix_fallocate(descriptor, allocated, size - allocated)
                else:
                    allocate(descriptor, size)
            with self._lock:
                self._allocated = size
        except OSError as error:
            raise ArenaTooSmall(f"parity of {binary(size)} does not fit: {error}") from error
        finally:
            os.close(descriptor)
            with self._lock:
                self._is_growing = False

    def add(self, member: str, number: int, data: memoryview, digest: str) -> None:
        """Take a piece into the XOR.

        Raises FastckptError if it is not the next one of its member, or the place was released. Raises ArenaTooSmall if
        the disk does not take it: then the place never counts.
        """
        with self._lock:
            known = self.record.members[member]
            if self._descriptor < 0 or len(known.digests) != number:
                raise FastckptError(f"piece {number} of {member} is not what comes next in the parity of {self.id}")
            start, end = number * self.record.piece, number * self.record.piece + len(data)
            # Bytes that no chunk has reached are overwritten, not XORed: pages that serve again have old bytes.
            old = max(0, min(self._filled - start, len(data)))
            (self._add_in_memory if is_in_memory(self._descriptor) else self._add_on_disk)(start, data, old)
            self._filled = max(self._filled, end)
            known.digests.append(digest)

    def _add_in_memory(self, start: int, data: memoryview, old: int) -> None:
        if old:
            mapped = mmap.mmap(self._descriptor, start + old)
            with mapped, memoryview(mapped) as view, view[start:] as target, data[:old] as source:
                xor_into(target, source)
        while old < len(data):  # not through a mapping, each page of which would fault first
            old += os.pwrite(self._descriptor, data[old:], start + old)

    def _add_on_disk(self, start: int, data: memoryview, old: int) -> None:
        """Do so without a mapping: a disk that fails would kill a process that writes to one."""
        block = bytearray(min(ON_DISK, len(data)))
        try:
            for offset in range(0, len(data), ON_DISK):
                with data[offset : offset + ON_DISK] as piece, memoryview(block)[: len(piece)] as joined:
                    joined[:] = piece
                    if count := max(0, min(old - offset, len(piece))):
                        there = os.pread(self._descriptor, count, start + offset)
                        with joined[:count] as target, memoryview(there) as source:
                            xor_into(target, source)
                    write_out(self._descriptor, joined, start + offset)
        except (OSError, ValueError) as error:  # half of a piece may be in it: it can never count
            os.close(self._descriptor)
            self._descriptor = -1
            raise ArenaTooSmall(f"parity of {self.id} cannot be kept in {self.path}: {error}") from error

    def finish(self) -> None:
        """Make it count; call it once, when it is whole."""
        with self._lock, metrics.phase("parity.commit", step=self.id.step):
            os.ftruncate(self._descriptor, self._filled)
            write_parity(self.path, self.record)
        self.close()

    def close(self) -> bool:
        """Take no more pieces; whether the pages of the block may serve again: none is being made."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1
            return not self._is_growing


def xor_into(target: memoryview, source: memoryview) -> None:
    """XOR equally many bytes into memory."""
    found = np.frombuffer(target, np.uint8)
    np.bitwise_xor(found, np.frombuffer(source, np.uint8), out=found)
