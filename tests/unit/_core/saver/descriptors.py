"""A want of descriptors in this process."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Without a descriptor to spare; gives what ends that."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]

    def end() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        while held:
            os.close(held.pop())

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, limit[1]))
        with contextlib.suppress(OSError):
            while True:  # numbers below that may be free
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield end
    finally:
        end()
