"""Copies a file from memory to storage at the storage's rate, and digests it on the way."""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import xxhash

from fastckpt._core.huge_pages import is_in_memory, window
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.io.regular_file import open_regular
from fastckpt._core.io.unbuffered import SECTOR, UnbufferedWriter, create, pass_page_cache, read_some

BLOCK = 32 * 2**20
"""Bytes that are mapped, digested and written at once."""
READ = 2 * 2**20
"""Bytes read at once from the page cache: they are digested while they are in the processor's."""
READ_DIRECT = 8 * 2**20
"""Bytes read at once from storage: enough to keep it busy."""


class CopyPacing(Protocol):
    """Decides when bytes may be written."""

    @property
    def portion(self) -> int | None:
        """Bytes to write between two calls of `wait_for`, at most; None for any number."""

    def wait_for(self, count: int) -> None:
        """Return when ``count`` bytes may be written; its errors end the copy."""


class _AtOnce:
    portion = None

    def wait_for(self, count: int) -> None:
        pass


class Counted:
    """Copier without a limit; a function gets the number of bytes."""

    portion = None

    def __init__(self, count: Callable[[int], None]) -> None:
        self.wait_for = count


def copy_file(
    source: Path,
    target: Path,
    pace: CopyPacing = _AtOnce(),  # noqa: B008
    *,
    files: DirectoryRoot | None = None,
) -> tuple[int, str]:
    """Copy ``source`` to the new file ``target``, durably: its bytes outlive a crash once this returns.

    A source in memory is mapped, since reading a tmpfs through a mapping costs no copy; it must not shrink meanwhile,
    else the process dies of SIGBUS. One on a disk is read: there a mapping would end the process at a read error,
    too. Holes are not read, which would fill them, and become holes of the target.
    The target's name is durable only when its directory has been synced, too.

    Args:
        source: A file that nobody changes.
        target: A path at which nothing is.
        pace: Asked before bytes are written.
        files: The directory below which no link leads to the target; by default the target's own.

    Returns:
        The size in bytes, and the xxh3-128 digest in 32 hexadecimal digits.

    Raises:
        OSError: ``target`` exists, or source or target failed. A partial target is removed.
    """
    files = files or DirectoryRoot(target.parent)
    with contextlib.ExitStack() as on_exit:
        # 1. open the source and nothing else   2. create the target, to be removed on failure   3. copy block by block
        # with O_DIRECT, digesting meanwhile   4. the file's length, and fdatasync
        reader = open_regular(source)
        on_exit.callback(os.close, reader)
        writer = create(target, files)
        on_failure = on_exit.enter_context(contextlib.ExitStack())
        # Registered after `create`: a target that existed before is another's, and is not removed.
        on_failure.callback(files.unlink, target)
        on_exit.callback(os.close, writer)
        size = os.fstat(reader).st_size
        digest = _copy(reader, UnbufferedWriter(writer), size, pace)
        on_failure.pop_all()
    return size, digest


def digest_file(path: Path, *, direct: bool = False, pace: CopyPacing = _AtOnce()) -> str:  # noqa: B008
    """The xxh3-128 digest of a file in 32 hexadecimal digits; raises OSError if it cannot be read.

    With ``direct`` the bytes are read from storage, past the page cache, as far as the file system can do that. So the
    digest is that of the bytes on storage, not of those that were meant to be written. ``pace`` is asked before bytes
    are digested.
    """
    digest = xxhash.xxh3_128()
    with contextlib.ExitStack() as on_exit:
        reader = open_regular(path, follow=True)
        on_exit.callback(os.close, reader)
        if direct:
            # Pages of this file in the cache would be read instead of the disk where O_DIRECT is refused.
            os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)
            pass_page_cache(reader)
        else:
            os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        # Pages, since O_DIRECT takes no memory that is aligned to less.
        buffer = on_exit.enter_context(mmap.mmap(-1, READ_DIRECT if direct else READ))
        view = on_exit.enter_context(memoryview(buffer))
        offset = 0
        while size := read_some(reader, view, offset):
            offset += size
            pace.wait_for(size)
            with view[:size] as block:
                digest.update(block)
    return digest.hexdigest()


def _copy(reader: int, target: UnbufferedWriter, size: int, pace: CopyPacing) -> str:
    digest, end = xxhash.xxh3_128(), 0
    # xxhash and pwrite release the GIL, so a block is digested while the same block is being written.
    with ThreadPoolExecutor(1, "fastckpt-digest") as thread:
        for offset, length in _blocks(reader, size, min(BLOCK, pace.portion or BLOCK) // SECTOR * SECTOR):
            # A hole reads as zeros: the digest is that of the bytes that a reader gets, wherever the holes are.
            _digest_hole(digest, offset - end)
            pace.wait_for(length)
            with _block(reader, offset, length) as view:
                digested = thread.submit(digest.update, view)
                try:
                    target.write(view, offset)
                finally:
                    # Also if the write has failed: the digest reads the mapping, which is unmapped next.
                    digested.result()
            end = offset + length
    _digest_hole(digest, size - end)
    target.finish(size)
    return digest.hexdigest()


@contextlib.contextmanager
def _block(reader: int, offset: int, length: int) -> Iterator[memoryview]:
    """Bytes of a file, in memory that O_DIRECT takes: whole pages."""
    if is_in_memory(reader):
        with window(reader, offset, length) as source, source.view() as view:
            yield view
    else:
        # An anonymous mapping is aligned to pages, which bytes objects are not.
        with mmap.mmap(-1, length) as buffer, memoryview(buffer) as view:
            _read_exactly(reader, view, offset)
            yield view


def _read_exactly(reader: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        with view[done:] as rest:
            count = os.preadv(reader, [rest], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the source ends at {offset + done}; it had {len(view) - done} bytes more")
        done += count


def _blocks(reader: int, size: int, block: int) -> Iterator[tuple[int, int]]:
    """Offset and length of blocks of at most that size, which begin at whole sectors; between them are holes."""
    for start, end in _extents(reader, size):
        for offset in range(start, end, block):
            yield offset, min(block, end - offset)


def _extents(reader: int, size: int) -> Iterator[tuple[int, int]]:
    # st_blocks counts units of 512 bytes on Linux, whatever the file system's block size is.
    if os.fstat(reader).st_blocks * 512 >= size:
        yield 0, size  # nothing is missing, so there is no hole to look for
        return
    end = 0
    while (start := _seek(reader, end, os.SEEK_DATA, size)) < size:
        # Data may begin and end within a sector; O_DIRECT takes whole ones, and the bytes around are zeros anyway.
        start, end = start // SECTOR * SECTOR, _seek(reader, start, os.SEEK_HOLE, size)
        end = min(size, -(-end // SECTOR) * SECTOR)
        yield start, end


def _seek(reader: int, offset: int, whence: int, size: int) -> int:
    try:
        return os.lseek(reader, offset, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole follows
            return size
        raise


def _digest_hole(digest: xxhash.xxh3_128, count: int) -> None:
    zeros = memoryview(bytes(min(count, READ)))
    for offset in range(0, count, READ):
        digest.update(zeros[: count - offset])
