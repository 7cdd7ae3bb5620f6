"""Copies a file from memory to storage at the storage's rate, and digests it on the way."""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import xxhash

BLOCK = 32 * 2**20
"""Bytes that are mapped, digested and written at once."""
SECTOR = 4096
"""O_DIRECT takes no shorter unit than this on any file system that we know."""
READ = 2 * 2**20


class Pace(Protocol):
    """Says when bytes may be written."""

    @property
    def portion(self) -> int | None:
        """Bytes to write between two calls of `wait_for`, at most; None for any number."""

    def wait_for(self, count: int) -> None:
        """Return when ``count`` bytes may be written; what it raises ends the copy."""


class _AtOnce:
    portion = None

    def wait_for(self, count: int) -> None:
        pass


def copy_file(source: Path, target: Path, pace: Pace = _AtOnce()) -> tuple[int, str]:  # noqa: B008
    """Copy ``source`` to the new file ``target``, durably: its bytes outlive a crash once this returns.

    The source is mapped, since reading a tmpfs through a mapping costs no copy; it must not shrink meanwhile,
    else the process dies of SIGBUS. The target's name is durable only when its directory has been synced, too.

    Args:
        source: A file that nobody changes.
        target: A path at which nothing is.
        pace: Asked before bytes are written.

    Returns:
        The size in bytes, and the xxh3-128 digest in 32 hexadecimal digits.

    Raises:
        OSError: ``target`` exists, or source or target failed. What was written of the target is removed.
    """
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.ExitStack() as on_exit:
        on_exit.callback(os.close, reader)
        writer = _create(target)
        on_failure = on_exit.enter_context(contextlib.ExitStack())
        on_failure.callback(target.unlink, missing_ok=True)
        on_exit.callback(os.close, writer)
        size = os.fstat(reader).st_size
        digest = _copy(reader, writer, size, pace)
        os.fdatasync(writer)
        on_failure.pop_all()
    return size, digest


def digest_file(path: Path, *, direct: bool = False, pace: Pace = _AtOnce()) -> str:  # noqa: B008
    """The xxh3-128 digest of a file in 32 hexadecimal digits; raises OSError if it cannot be read.

    With ``direct`` the bytes are read from storage, past the page cache, as far as the file system can do that:
    so it is told what storage holds, not what was meant to be written there. ``pace`` is asked before bytes are
    digested.
    """
    digest = xxhash.xxh3_128()
    with contextlib.ExitStack() as on_exit:
        reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        on_exit.callback(os.close, reader)
        if direct:
            os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)
            _set_direct(reader)
        else:
            os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        # Pages, since O_DIRECT takes no memory that is aligned to less.
        buffer = on_exit.enter_context(mmap.mmap(-1, READ))
        view = on_exit.enter_context(memoryview(buffer))
        offset = 0
        while size := _read_some(reader, view, offset):
            offset += size
            pace.wait_for(size)
            with view[:size] as block:
                digest.update(block)
    return digest.hexdigest()


def _set_direct(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # then the page cache is used, from which all was dropped that could be
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def _read_some(reader: int, buffer: memoryview, offset: int) -> int:
    try:
        return os.preadv(reader, [buffer], offset)
    except OSError as error:
        if error.errno != errno.EINVAL or not _use_page_cache(reader):
            raise
    return os.preadv(reader, [buffer], offset)


def _create(target: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(target, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    target.unlink(missing_ok=True)  # O_CREAT makes the file before O_DIRECT is refused
    return os.open(target, flags, 0o600)


def _copy(reader: int, writer: int, size: int, pace: Pace) -> str:
    block = min(BLOCK, pace.portion or BLOCK) // SECTOR * SECTOR
    digest = xxhash.xxh3_128()
    with ThreadPoolExecutor(1, "fastckpt-digest") as thread:
        for offset in range(0, size, block):
            length = min(block, size - offset)
            pace.wait_for(length)
            with _window(reader, offset, length) as window:
                digested = thread.submit(digest.update, window)
                try:
                    _write(writer, window, offset)
                finally:
                    digested.result()
    return digest.hexdigest()


@contextlib.contextmanager
def _window(reader: int, offset: int, length: int) -> Iterator[memoryview]:
    # Small windows, since unmapping holds the GIL for as long as the mapping is large.
    with (
        mmap.mmap(reader, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset) as window,
        memoryview(window) as view,
    ):
        yield view


def _write(writer: int, view: memoryview, offset: int) -> None:
    aligned = len(view) // SECTOR * SECTOR
    # Each slice is released where it was made: one that a traceback kept would keep the window mapped.
    with view[:aligned] as sectors:
        _write_exactly(writer, sectors, offset)
    if aligned < len(view):
        _use_page_cache(writer)
        with view[aligned:] as tail:
            _write_exactly(writer, tail, offset + aligned)


def _write_exactly(writer: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        with view[done:] as rest:
            done += _write_some(writer, rest, offset + done)


def _write_some(writer: int, view: memoryview, offset: int) -> int:
    try:
        count = os.pwrite(writer, view, offset)
    except OSError as error:
        if error.errno != errno.EINVAL or not _use_page_cache(writer):
            raise
        count = os.pwrite(writer, view, offset)
    if count == 0:
        raise OSError(errno.EIO, f"a write of {len(view)} bytes at {offset} wrote none")
    return count


def _use_page_cache(writer: int) -> bool:
    """Turn O_DIRECT off for what it refuses; returns whether it was on."""
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
