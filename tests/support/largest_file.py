"""A limit on the size of files: a disk that takes the first bytes of a file, and no more of it."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file gets more bytes from this process: writes beyond end with EFBIG, as Python ignores SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
