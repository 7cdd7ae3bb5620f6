"""Descriptors of this process that its script may have closed: their numbers may be other files' by now."""

import os


def opened(descriptor: int) -> tuple[int, int] | None:
    """The file, pipe or socket that a descriptor leads to, by device and inode; None if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def close_own(descriptor: int, own: tuple[int, int] | None) -> None:
    """Close a descriptor if it is still the one that was ``opened``: a script that daemonizes closes all there are."""
    if own is not None and opened(descriptor) == own:
        os.close(descriptor)
