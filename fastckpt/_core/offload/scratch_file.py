"""The file that offloaded activations are written to: without a name, so that nothing is left of it, however we end."""

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile
import weakref
from pathlib import Path

from fastckpt._core.death_notes import DeathNotes
from fastckpt._core.huge_pages import is_in_memory
from fastckpt._core.io.unbuffered import SECTOR, direct_alignment
from fastckpt._core.offload.regions import Region, Regions

GROWTH = 256 << 20
"""Bytes by which the file grows at once: allocating blocks costs a transaction of the file system's journal."""
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class ScratchFile:
    """A nameless file in a directory, given out by regions.

    Args:
        directory: An existing directory.

    Raises:
        OSError: No file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.descriptor = _open_nameless(directory)
        # Not at exit: threads may read until the very end, and its number would be that of another file.
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.memory_alignment, unit = direct_alignment(self.descriptor)
        self.unit = max(SECTOR, unit)
        """Alignment of the offsets and lengths of transfers."""
        self.in_memory = is_in_memory(self.descriptor)
        self._regions = Regions(self.unit)
        self._allocated = 0
        self._dead = DeathNotes[Region]()

    @property
    def direct(self) -> bool:
        """True if transfers bypass the page cache."""
        return bool(fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    @property
    def used(self) -> int:
        """Bytes of regions that are in use."""
        self._bury()
        return self._regions.used

    @property
    def length(self) -> int:
        """Bytes of the file that were ever in use."""
        return self._regions.end

    def take(self, size: int) -> Region:
        """A region of the file, with its blocks; raises OSError if the disk is full. Not for two threads at once."""
        self._bury()
        region = self._regions.take(size)
        if region.end > self._allocated:
            try:
                self._allocate(region.end)
            except OSError:
                self._regions.give_back(region)
                raise
        return region

    def free_with(self, owner: object, region: Region) -> None:
        """Have a region be free when an object dies, in whichever thread."""
        self._dead.watch(owner, region)

    def _bury(self) -> None:
        for region in self._dead.taken():
            self._regions.give_back(region)

    def _allocate(self, end: int) -> None:
        """Allocate blocks ahead, at least up to ``end``."""
        for target in (max(end, self._allocated + GROWTH), end):
            if not _libc.fallocate(self.descriptor, 0, self._allocated, target - self._allocated):
                self._allocated = target
                return
            number = ctypes.get_errno()
            if number in UNSUPPORTED:  # then a write allocates its blocks, or fails
                self._allocated = 1 << 62
                return
        raise OSError(number, os.strerror(number), str(self.directory))


def _open_nameless(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    for direct in (os.O_DIRECT, 0):
        with contextlib.suppress(OSError):
            return os.open(directory, flags | os.O_TMPFILE | direct, 0o600)
    # No O_TMPFILE: a name that lasts for two system calls. A file that cannot be made at all is an error here.
    descriptor, name = tempfile.mkstemp(prefix=".fastckpt-offload-", dir=directory)
    Path(name).unlink()
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    return descriptor
