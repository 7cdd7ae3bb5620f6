"""Opens regular files alone: a pipe, a device or an endless file at their name is refused, and waited for by nobody."""

import errno
import os
import stat
from pathlib import Path

LARGEST = 1 << 20
"""Bytes of a small file, at most, unless another limit is given."""


class IrregularFile(OSError):
    """A link, pipe, device or giant where a file of bounded size must be: it answers, and is not the written file."""


def open_regular(path: Path | str, *, follow: bool = False) -> int:
    """A descriptor of a regular file, to be read; raises IrregularFile for anything else.

    With ``follow`` its name may be that of a link, as where users moved a checkpoint to another disk.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer that never comes.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise IrregularFile(errno.ELOOP, "it is a link, which is not followed here", str(path)) from error
        raise
    return demand_regular(descriptor, path)


def demand_regular(descriptor: int, path: Path | str) -> int:
    """The descriptor, if it is that of a regular file; else it is closed, and IrregularFile raised, with the path."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IrregularFile(errno.EINVAL, "it is no regular file", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_small(path: Path | str, limit: int = LARGEST, *, follow: bool = False) -> bytes:
    """The bytes of a regular file; raises IrregularFile for anything else, and for one that has more than ``limit``."""
    descriptor = open_regular(path, follow=follow)
    try:
        data = b""
        # read(2) may return less than it was asked for, on file systems of networks.
        while more := os.read(descriptor, limit + 1 - len(data)):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise IrregularFile(errno.EINVAL, f"it has more than {limit} bytes", str(path))
    return data
