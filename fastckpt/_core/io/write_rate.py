"""Measures the rate at which a directory takes a checkpoint: bytes that are written as the persister writes them."""

import errno
import mmap
import os
import secrets
import time
from pathlib import Path

from fastckpt._core.io.direct import BLOCK
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.io.unbuffered import UnbufferedWriter, create, pass_page_cache

MOST = 256 << 20
"""Bytes that are written at most."""
LONGEST = 5.0
"""Seconds after which no further block is begun."""
NAME = ".fastckpt-plan-"
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOSYS)


def write_rate(directory: Path, size: int) -> float:
    """Bytes per second at which a file of ``size`` bytes, or of the first of them, becomes durable in a directory.

    Nothing is left: the file has no name, or loses it before the first byte. Random bytes are written, since file
    systems may compress others.

    Raises:
        OSError: Nothing can be written there.
    """
    descriptor = open_nameless(directory)
    try:
        size = max(1, min(size, MOST))
        block_size = min(BLOCK, size)
        with mmap.mmap(-1, block_size) as buffer, memoryview(buffer) as view:
            view[:] = os.urandom(block_size)
            writer, done = UnbufferedWriter(descriptor), 0
            begun = time.perf_counter()
            while done < size and time.perf_counter() - begun < LONGEST:
                with view[: size - done] as block:
                    writer.write(block, done)
                    done += len(block)
            writer.finish(done)
            return done / (time.perf_counter() - begun)
    finally:
        os.close(descriptor)


def open_nameless(directory: Path) -> int:
    """A file that is gone when it is closed, written past the page cache where that is taken; raises OSError."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
        path = directory / f"{NAME}{secrets.token_hex(8)}"
        descriptor = create(path, DirectoryRoot(directory))
        path.unlink()
        return descriptor
    pass_page_cache(descriptor)
    return descriptor
