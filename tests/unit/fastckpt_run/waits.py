"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable

DEADLINE = 60.0


def until(condition: Callable[[], object], what: str = "it does not come about") -> None:
    """Wait until something has happened."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
