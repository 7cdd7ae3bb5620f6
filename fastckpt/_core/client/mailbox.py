"""Messages of ranks in a store that all of them reach, such as the one that formed their process group."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

GLANCE = timedelta(seconds=2)
"""The first wait in the store, in which Python handles no signal."""
LONGEST_GLANCE = timedelta(seconds=64)
"""Each wait is twice as long as the one before, up to this: torch logs a warning for each that times out."""
PIECE = 4 << 20
"""Bytes of a message in one value of the store, which refuses more than 8 MiB."""
MOST_KEYS = 1024
"""Keys in one question to the store."""
MOST_READ = 64
"""Messages that are read in one request: the store holds all of them in one answer."""
_ABSENT = "?"
"""Value for neither message nor word: with it as the expected value `compare_set` is a read that does not wait."""


class Found(NamedTuple):
    """A message, and the number of its pieces."""

    message: Any
    pieces: int


class StoreMailbox:
    """Messages of ranks in a store: a sender waits for nobody, a receiver until a deadline at most."""

    def __init__(self, store: "dist.distributed_c10d.Store") -> None:
        self._store = store

    def encode(self, message: Any) -> bytes:
        """The bytes of a message."""
        return json.dumps(message).encode()

    def decode(self, data: bytes) -> Any:
        """The message of these bytes."""
        return json.loads(data)

    def put(self, key: str, message: Any) -> int:
        """Leave a message; returns the number of its pieces.

        The first piece is left last, because that one has the number of pieces and makes the rest count.
        """
        data = self.encode(message)
        pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)] or [b""]
        for number, piece in reversed(list(enumerate(pieces))):
            text = piece if number else b"%d " % len(pieces) + piece
            self._store.set(f"{key}/{number}" if number else key, text)  # type: ignore[arg-type]
        return len(pieces)

    def look(self, key: str) -> Found | None:
        """The message under a key; None if there is none. One round trip for a message of one piece.

        ``get`` would wait in the store, in which Python handles no signal, and would take two. Not for a key that may
        be absent and that others wait for: a TCPStore wakes them by it.
        """
        text = self._look(key)
        return None if text is None else self._whole(key, text)

    def read(self, key: str) -> Found:
        """A message that is there; raises KeyError if it is not."""
        if (found := self.look(key)) is None:
            raise KeyError(key)
        return found

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """Messages that are there, in one request for many."""
        if not self._store.has_extended_api():  # type: ignore[attr-defined]  # a FileStore has no multi_get
            return [self.read(key).message for key in keys]
        texts = itertools.chain.from_iterable(self._store.multi_get(batch) for batch in _batches(keys, MOST_READ))
        return [self._whole(key, text).message for key, text in zip(keys, texts, strict=True)]

    def _look(self, key: str) -> bytes | None:
        text: bytes = self._store.compare_set(key, _ABSENT, _ABSENT)
        return None if text == _ABSENT.encode() else text

    def _whole(self, key: str, text: bytes) -> Found:
        count, _, first = text.partition(b" ")
        rest = [self._store.get(f"{key}/{number}") for number in range(1, int(count))]
        return Found(self.decode(b"".join([first, *rest])), int(count))

    def wait(self, keys: Sequence[str], end: float, check: Callable[[], object] = lambda: None) -> None:
        """Return when all these messages are there; call ``check``, which may raise, from time to time before that.

        Args:
            keys: Keys of the messages.
            end: End of the wait, by time.monotonic; raises TimeoutError then.
            check: Called after waits of `GLANCE` and twice as long each.
        """
        patience = GLANCE
        for batch in _batches(keys):
            while not self._wait(batch, min(patience, timedelta(seconds=max(0.001, end - time.monotonic())))):
                patience = min(2 * patience, LONGEST_GLANCE)
                check()
                if time.monotonic() > end:
                    raise TimeoutError(batch[0])

    def _wait(self, keys: list[str], patience: timedelta) -> bool:
        """Return whether all these keys are there before the patience ends."""
        try:
            self._store.wait(keys, patience)
        except RuntimeError as error:  # each kind of store has its own for this
            if "timeout" not in str(error).lower():
                raise
            return False
        return True

    def remove(self, key: str, pieces: int = 0) -> None:
        """Remove a message that everybody has read, or a counter of `add`; without the number of pieces, all there."""
        self._store.delete_key(key)  # the result means nothing: a FileStore always returns True
        for number in range(1, pieces) if pieces else itertools.count(1):
            if not pieces and not self._store.check([f"{key}/{number}"]):
                return
            self._store.delete_key(f"{key}/{number}")

    def has(self, *keys: str) -> bool:
        """Return whether there is a message under each of these keys."""
        return all(self._store.check(batch) for batch in _batches(keys))

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a number, which is 0 at first; returns the sum."""
        return int(self._store.add(key, amount))

    def word(self, key: str) -> str | None:
        """The short word or the number under a key; None if there is none. One round trip to the store."""
        found = self._look(key)
        return None if found is None else found.decode()

    def put_word(self, key: str, word: str) -> str:
        """Set a short word, visible to all ranks on return, unless one is set; returns the one that is."""
        first: bytes = self._store.compare_set(key, "", word)
        return first.decode()

    def replace_word(self, key: str, word: str) -> None:
        """Set a short word, in place of any other."""
        self._store.set(key, word)


def _batches(keys: Sequence[str], most: int = MOST_KEYS) -> Iterator[list[str]]:
    return ([*keys[start : start + most]] for start in range(0, len(keys), most))
