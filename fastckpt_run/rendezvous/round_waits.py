"""Waits of the agents of a round for each other, which end with the round: one may die before it has answered."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

_SHORTEST, _LONGEST = 0.002, 0.1
"""Seconds from one look to the next."""


class RoundEnded(RuntimeError):
    """A round has ended before all its agents had met: another one follows."""


class RoundWaits:
    """A store with waits that raise RoundEnded when the round has ended; all else is the store's own.

    torch's agent waits a minute in it for another one's value, and fails then.
    """

    def __init__(self, store: Store, timeout: timedelta, is_ended: Callable[[], bool]) -> None:
        self._store, self._timeout, self._is_ended = store, timeout, is_ended

    @property
    def timeout(self) -> timedelta:
        """Maximum duration of a wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Have waits take so long at most."""
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        """A value, when there is one."""
        self.wait([key])
        return bytes(self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Values, when there are all."""
        self.wait(keys)
        return [bytes(value) for value in self._store.multi_get(keys)]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until there are values, for `timeout` by default; raises as the store at its end."""
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause = _SHORTEST
        while not self._store.check(keys):
            if self._is_ended():
                raise RoundEnded("a node of this round is gone, or another one came")
            if time.monotonic() > end:
                return self._store.wait(keys, timedelta(milliseconds=1))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return None
