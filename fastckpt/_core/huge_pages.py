"""Maps parts of files so that the processor's large pages can serve them, and asks for such pages."""

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HUGE = 2 * 2**20
"""Bytes of a large page; where the processor has another size, small pages serve."""
MADV_COLLAPSE = 25
"""Advice of Linux 6.1 and later. It needs no option of the mount, unlike all other ways to large pages in a tmpfs."""
MADV_POPULATE_READ = 22
"""Advice of Linux 5.14 and later. In a mapped tmpfs it makes pages where there are none."""
TMPFS = 0x01021994
"""The type of a tmpfs in statfs(2)."""
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PROT_NONE, MAP_FIXED = 0, 0x10


@dataclass(frozen=True)
class Window:
    """A part of a file in memory, for reading, for as long as `window` lasts."""

    address: int
    length: int

    def view(self) -> memoryview:
        """Its bytes; release it, and views cut from it, before the window ends."""
        return memoryview((ctypes.c_char * self.length).from_address(self.address)).cast("B").toreadonly()

    def collapse(self) -> bool:
        """Move it into large pages, as far as it fills them; returns whether that succeeded."""
        return not _libc.madvise(self.address, self.length, MADV_COLLAPSE)

    def populate(self) -> bool:
        """Give it the pages that it lacks, zeroed; returns whether that succeeded."""
        return not _libc.madvise(self.address, self.length, MADV_POPULATE_READ)


class Mapping:
    """A whole file in memory, for reading and writing, its pages faulted in; forked children do not have it.

    Its address is a multiple of the size of a large page, else none could serve it: a copy into small ones takes a
    fifth more of the processor's time.

    Else workers of a data loader would keep the memory of a file that was replaced, until they end. In a forked child
    its addresses are unmapped, or something else is mapped there: so a child never unmaps it, as Python's mmap would.
    """

    def __init__(self, descriptor: int, length: int) -> None:
        """Map the file's first ``length`` bytes; raises OSError if that fails."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = _map_aligned(length, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE, descriptor)
        _keep_from_children(self.address, length)
        self._end = weakref.finalize(self, _unmap, self.address, length, os.getpid())
        self._end.atexit = False  # threads may use it until the very end
        self.view = memoryview((ctypes.c_char * length).from_address(self.address)).cast("B")

    def close(self) -> None:
        """Unmap, when no thread uses it."""
        self.view.release()
        self._end()


def _unmap(address: int, length: int, owner: int) -> None:
    if os.getpid() == owner:
        _libc.munmap(address, length)


def _keep_from_children(address: int, length: int) -> None:
    _libc.madvise(address, length, mmap.MADV_DONTFORK)  # memory that refuses it has been mapped all the same


@contextlib.contextmanager
def not_in_children(address: int, length: int) -> Iterator[None]:
    """Have whole pages not be in children that are forked in this block.

    Before Linux 6.3 a fork during a direct read into private memory may leave the parent with a page as it was before,
    and the data in the child: see open(2).
    """
    _keep_from_children(address, length)
    try:
        yield
    finally:
        _libc.madvise(address, length, mmap.MADV_DOFORK)


def use_huge_pages(address: int, length: int) -> None:
    """Have memory without pages get large ones, as far as they fit: a read into it takes half the processor time."""
    start, end = -(-address // HUGE) * HUGE, (address + length) // HUGE * HUGE
    if start < end:
        _libc.madvise(start, end - start, mmap.MADV_HUGEPAGE)  # without them it has small ones


def own_pages() -> Iterator[int]:
    """The addresses of this process's own memory, written or not, that large pages could hold, one by one."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text(errors="replace").splitlines()]
    for place, access, _, _, _, *name in lines:
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(number, 16) for number in place.split("-"))
            yield from range(-(-start // HUGE) * HUGE, end // HUGE * HUGE, HUGE)


def collapse(address: int) -> None:
    """Move the memory of a large page into one, if it has any and the kernel finds one; its bytes stay the same."""
    _libc.madvise(address, HUGE, MADV_COLLAPSE)


def is_in_memory(descriptor: int) -> bool:
    """Return whether a file is on a tmpfs: reading its mapping cannot fail as long as it does not shrink."""
    status = ctypes.create_string_buffer(256)
    return not _libc.fstatfs(descriptor, status) and ctypes.c_long.from_buffer(status).value == TMPFS


@contextlib.contextmanager
def window(descriptor: int, offset: int, length: int) -> Iterator[Window]:
    """Map part of a file, from a multiple of the page size on; raises OSError if that fails.

    The kernel serves it by large pages only if address and offset agree modulo their size, which Python's mmap
    leaves to chance. The file must not shrink meanwhile, else the process dies of SIGBUS.
    """
    room = length + HUGE
    base = _map(None, room, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        address = base + (offset - base) % HUGE
        _map(address, length, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, descriptor, offset)
        _keep_from_children(base, room)
        yield Window(address, length)
    finally:
        _libc.munmap(base, room)


def map_without_descriptor(descriptor: int, length: int) -> mmap.mmap:
    """Map the first ``length`` bytes of a file; raises OSError if that fails.

    Python's own mapping of a file keeps a descriptor, and closes its number even if a script has closed that, and the
    number is another file's.
    """
    mapped = mmap.mmap(-1, length)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _map(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0)
    return mapped


def _map_aligned(length: int, protection: int, flags: int, descriptor: int) -> int:
    """Map the beginning of a file where large pages can serve it; returns the address."""
    room = length + HUGE
    base = _map(None, room, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-base // HUGE) * HUGE
    try:
        _map(address, length, protection, flags | MAP_FIXED, descriptor, 0)
    except OSError:
        _libc.munmap(base, room)
        raise
    # Memory around it is given back; munmap takes whole pages, and the file's last one is all of the mapping.
    end = address + -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    for start, rest in ((base, address - base), (end, base + room - end)):
        if rest > 0:
            _libc.munmap(start, rest)
    return address


def _map(*arguments: int | None) -> int:
    address = _libc.mmap(*arguments)
    if address == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)
