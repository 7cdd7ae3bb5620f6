"""Writes and reads files past the page cache, and through it where that is refused."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

from fastckpt._core.io.directory_root import DirectoryRoot

SECTOR = max(4096, mmap.PAGESIZE)
"""Every file system that has O_DIRECT takes it in this unit, and a file can be mapped from any multiple of it."""

WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range(2)."""

AT_EMPTY_PATH, STATX_DIOALIGN = 0x1000, 0x2000
"""Arguments of statx(2), with the places of both alignments in its answer; Python has no name for them before 3.15."""
_MASK, _MEMORY, _OFFSET = 0x00, 0x98, 0x9C

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def create(target: Path, files: DirectoryRoot) -> int:
    """Open a new file below a directory for `UnbufferedWriter`; raises OSError if it exists or cannot be made."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        # O_DIRECT keeps a checkpoint out of the page cache, where it would evict training data.
        return files.open(target, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    files.unlink(target)  # O_CREAT makes the file before O_DIRECT is refused
    return files.open(target, flags)


class WriteBehind:
    """Follows a writer to a file: of its bytes, only the last two blocks are in the page cache.

    Without it a checkpoint fills the memory of the host with pages that are yet to be written. The kernel then stops
    the next writer, and evicts the pages of others.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last: tuple[int, int] | None = None

    def wrote(self, offset: int, count: int) -> None:
        """Have these bytes written, and wait for those before; raises OSError if storage fails."""
        # sync_file_range starts the write-back of this block now and waits for the one before, so both proceed at the
        # device's pace. It is not durable before `UnbufferedWriter.finish`.
        _sync(self._descriptor, offset, count, WRITE)
        if self._last:
            _sync(self._descriptor, *self._last, WAIT_BEFORE | WRITE | WAIT_AFTER)
            os.posix_fadvise(self._descriptor, *self._last, os.POSIX_FADV_DONTNEED)
        self._last = (offset, count)

    def finish(self) -> None:
        """Drop the last blocks from the page cache; call when all is durable."""
        if self._last:
            # Only clean pages can be dropped, so after fdatasync.
            os.posix_fadvise(self._descriptor, *self._last, os.POSIX_FADV_DONTNEED)


def _sync(descriptor: int, offset: int, count: int, flags: int) -> None:
    if _libc.sync_file_range(descriptor, offset, count, flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class UnbufferedWriter:
    """Writes a new file, past the page cache as far as its file system takes that."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._behind = WriteBehind(descriptor)

    def write(self, view: memoryview, offset: int) -> None:
        """Write a block, at an offset that is a multiple of the sector."""
        aligned = len(view) // SECTOR * SECTOR
        # Each slice is released where it was made: one that a traceback kept would keep the window mapped.
        with view[:aligned] as sectors:
            self._write_exactly(sectors, offset)
        if aligned < len(view):
            use_page_cache(self._descriptor)
            with view[aligned:] as tail:
                self._write_exactly(tail, offset + aligned)
        if not fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            self._behind.wrote(offset, len(view))

    def finish(self, size: int) -> None:
        """Give the file its length and make it durable."""
        if os.fstat(self._descriptor).st_size < size:  # it ends in a hole
            os.ftruncate(self._descriptor, size)
        # fdatasync also writes the metadata that is needed to read the bytes, such as the length; not the times.
        os.fdatasync(self._descriptor)
        self._behind.finish()

    def _write_exactly(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                done += self._write_some(rest, offset + done)

    def _write_some(self, view: memoryview, offset: int) -> int:
        count = _with_or_without_direct(self._descriptor, lambda: os.pwrite(self._descriptor, view, offset))
        # Else a device that accepts nothing would keep the loop going for ever.
        if count == 0:
            raise OSError(errno.EIO, f"a write of {len(view)} bytes at {offset} wrote none")
        return count


def read_some(reader: int, buffer: memoryview, offset: int) -> int:
    """Read into a buffer of whole pages; returns how many bytes, 0 at the end of the file."""
    return _with_or_without_direct(reader, lambda: os.preadv(reader, [buffer], offset))


def _with_or_without_direct(descriptor: int, act: Callable[[], int]) -> int:
    """Read or write; if that is refused, again through the page cache, and then by a descriptor without O_DIRECT."""
    # Some file systems take O_DIRECT at open and refuse the write. Another thread may have turned it off meanwhile.
    for turn_off in (use_page_cache, _open_again):
        try:
            return act()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        turn_off(descriptor)
    return act()


def _open_again(descriptor: int) -> None:
    """Have a descriptor lead to an open file description that never had O_DIRECT.

    A server of FUSE, such as mergerfs, opens its own file with the flags of the first open, and learns of no later
    ones: it goes on to write unaligned bytes with O_DIRECT.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    try:
        opened = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
    except OSError:
        return  # for example, it has no name any more: the next attempt raises the error
    former = os.dup(descriptor)
    os.dup2(opened, descriptor, inheritable=False)
    os.close(opened)
    try:
        os.fsync(former)
    finally:
        os.close(former)  # by itself, not by dup2, which would hide that a server answers with an error


def direct_alignment(descriptor: int) -> tuple[int, int]:
    """Return the alignments for O_DIRECT: of addresses, and of offsets and lengths; whole sectors without statx."""
    answer = ctypes.create_string_buffer(256)
    statx = getattr(_libc, "statx", None)  # glibc 2.28; Linux 6.1 answers
    if statx is None or statx(descriptor, b"", AT_EMPTY_PATH, STATX_DIOALIGN, answer):
        return SECTOR, SECTOR
    mask, memory, offset = (int.from_bytes(answer.raw[at : at + 4], sys.byteorder) for at in (_MASK, _MEMORY, _OFFSET))
    return (memory, offset) if mask & STATX_DIOALIGN and memory and offset else (SECTOR, SECTOR)


def pass_page_cache(descriptor: int) -> None:
    """Turn O_DIRECT on, if the file system has it."""
    with contextlib.suppress(OSError):  # then the page cache is used, from which all was dropped that could be
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def use_page_cache(descriptor: int) -> bool:
    """Turn O_DIRECT off for writes that it refuses; returns whether it was on."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
