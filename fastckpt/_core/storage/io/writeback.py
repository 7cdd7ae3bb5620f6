"""Writes what lies in the page cache to storage while more is coming, so that little of it lies there."""

import ctypes
import os

WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range(2)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class WriteBehind:
    """Follows a writer to a file: of what it wrote, only the last two blocks lie in the page cache.

    Without it a checkpoint fills the memory of the host with pages that are yet to be written, until the kernel
    stops whoever writes next, and drives out what others have cached.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last: tuple[int, int] | None = None

    def wrote(self, offset: int, count: int) -> None:
        """Have these bytes written, and wait for those before; raises OSError if storage fails."""
        _sync(self._descriptor, offset, count, WRITE)
        if self._last:
            _sync(self._descriptor, *self._last, WAIT_BEFORE | WRITE | WAIT_AFTER)
            os.posix_fadvise(self._descriptor, *self._last, os.POSIX_FADV_DONTNEED)
        self._last = (offset, count)

    def finish(self) -> None:
        """Drop what is left; call when all is durable."""
        if self._last:
            os.posix_fadvise(self._descriptor, *self._last, os.POSIX_FADV_DONTNEED)


def _sync(descriptor: int, offset: int, count: int, flags: int) -> None:
    if _libc.sync_file_range(descriptor, offset, count, flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
