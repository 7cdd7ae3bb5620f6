"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import Any

DEADLINE = 60.0
"""Seconds, generous for busy machines."""


def until(condition: Callable[[], Any], what: str = "what is waited for") -> Any:
    """Wait until a condition holds, and return what it is then."""
    end = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come true in {DEADLINE} s"
        time.sleep(0.01)
    return found
