"""A store that counts what it is asked; a real one is behind it."""

from collections import Counter
from datetime import timedelta

import torch.distributed as dist


class CountingStore(dist.Store):
    """Passes all requests on to another store.

    Attributes:
        requests: How many requests of each kind were about keys that begin with ``under``.
    """

    def __init__(self, store: dist.Store, under: str = "") -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self._store, self._under = store, under

    def _count(self, kind: str, key: str) -> None:
        if self._under in key:
            self.requests[kind] += 1

    def set(self, key: str, value: bytes | str) -> None:
        self._count("set", key)
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self._count("get", key)
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        self._count("add", key)
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set", key)
        return self._store.compare_set(key, expected, desired)

    def deleteKey(self, key: str) -> bool:  # as torch calls it
        self._count("delete", key)
        return self._store.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys[0])
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count("wait", keys[0])
        self._store.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get", keys[0])
        return self._store.multi_get(keys)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    delete_key = deleteKey
