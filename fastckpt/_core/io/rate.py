"""A limit on the bytes per second that all who share it write together."""

import threading
import time
from collections.abc import Callable


class LeakyBucket:
    """Rate limit for bytes, by a clock of any origin: arithmetic only.

    Bytes go at the instant at which all that went before are paid for at the rate. Time in which nobody wrote is
    not saved up: after a pause one portion goes at once, and the next when that is paid for. So until any time t
    after the first portion, at most ``t * rate`` bytes and the portion that goes just then have gone.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._paid = float("-inf")

    def reserve(self, count: int, now: float) -> float:
        """Seconds from ``now`` after which these bytes may go; those asked for later go after them."""
        # Never before now: unused time is no credit, or a pause would be followed by a burst at full speed.
        start = max(self._paid, now)
        self._paid = start + count / self._rate
        return start - now


class RateLimit:
    """A limit for several threads, each of which asks before it writes."""

    PORTIONS_PER_SECOND = 10
    """Writes per second that are enough for an even flow of bytes."""
    SMALLEST = 2**20

    def __init__(self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        # Not below 1 MiB, so that a low limit does not turn a copy into thousands of small direct writes.
        self.portion = max(self.SMALLEST, int(bytes_per_second / self.PORTIONS_PER_SECOND))
        """Bytes that should be asked for at once, at most."""
        self._schedule = LeakyBucket(bytes_per_second)
        self._clock = clock
        self._lock = threading.Lock()

    def reserve(self, count: int) -> float:
        """Seconds that the caller shall wait before it writes these bytes."""
        with self._lock:
            return self._schedule.reserve(count, self._clock())
