"""A store in which the nodes of a check leave messages for each other."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fastckpt_run.rendezvous.round_waits import RoundEnded
from fastckpt_run.rendezvous.store_connection import StoreConnection

_SHORTEST, _LONGEST = 0.005, 0.1
"""Seconds from one look to the next."""


class KeyValueStore(Protocol):
    """The part of a torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that have one."""


class ConnectedStore:
    """A `KeyValueStore` with a deadline for each call; they raise StoreLost."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._connection.set(key, value.encode())

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return self._connection.has_all(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that have one."""
        return self._connection.get_all(keys)


class Board:
    """Messages under the names of one check.

    Args:
        store: Has them.
        prefix: Begins the keys of this check, and of no other one.
        is_over: Returns whether there is nothing to wait for any more: the round has ended.
    """

    def __init__(self, store: KeyValueStore, prefix: str, is_over: Callable[[], bool] = lambda: False) -> None:
        self._store, self._prefix, self._is_over = store, prefix, is_over

    def put(self, name: str, message: str) -> None:
        """Leave a message."""
        self._store.set(self._prefix + name, message)

    def take(self, names: Sequence[str], end: float) -> Mapping[str, bytes]:
        """The messages of these names that are there at ``end`` on the monotonic clock, or sooner if all are.

        Raises RoundEnded if it is over.
        """
        keys = [self._prefix + name for name in names]
        pause = _SHORTEST
        while not (is_whole := self._store.check(keys)) and time.monotonic() < end:
            if self._is_over():
                raise RoundEnded("a node of this round is gone, or another one came")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        if not is_whole:  # each is asked for once
            there = [self._store.check([key]) for key in keys]
            names, keys = ([each for each, has in zip(all, there, strict=True) if has] for all in (names, keys))
        return dict(zip(names, self._store.multi_get(list(keys)), strict=True)) if keys else {}
