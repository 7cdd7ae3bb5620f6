"""Exchanges values among the ranks of a job, as messages over the store that formed the process group."""

import contextlib
import hashlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist

from fastckpt._core.client.job_store import (
    GLANCE,
    TIMEOUT,
    forgetting_addresses,
    job_store_if_met,
    job_stores,
)
from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId
from fastckpt.errors import ConfigError, FastckptError

LONGEST_GLANCE = timedelta(seconds=64)
"""After a glance it is checked whether a rank whose message lacks has left; each glance is twice as long."""
LONGEST_PAUSE = 0.05
"""Seconds between two looks at whether a message is there, where another message may make it needless."""
PIECE = 4 << 20
"""Bytes of a message in one value of the store, which refuses more than 8 MiB."""
ANY = "any"
"""The key that is set when any rank has left; a key of its own names the rank."""

Answers = Callable[[], list[Any]]


class PeerDeparted(FastckptError):
    """A rank has left an agreement and sends no more values."""


class Overtaken(Exception):
    """A message that was waited for is not needed any more."""


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

    def put(self, key: str, message: Any) -> None:
        """Leave a message: its first piece last, because that one has the number of pieces and makes the rest count."""
        data = self.encode(message)
        pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)] or [b""]
        for number, piece in reversed(list(enumerate(pieces))):
            text = piece if number else b"%d " % len(pieces) + piece
            self._store.set(f"{key}/{number}" if number else key, text)  # type: ignore[arg-type]

    def read(self, key: str) -> Any:
        """A message that is there."""
        count, _, first = self._store.get(key).partition(b" ")
        return self.decode(first + b"".join(self._store.get(f"{key}/{number}") for number in range(1, int(count))))

    def get(self, key: str, end: float, unless: str = "") -> Any:
        """The message, once it is there.

        Args:
            key: Where it is left.
            end: When to wait no longer, by time.monotonic.
            unless: A word that makes the message needless.

        Raises:
            TimeoutError: It has not come.
            Overtaken: The other word was left first.
        """
        self._poll(lambda: self._store.check([key]), key, end, unless)
        return self.read(key)

    def barrier(self, key: str, count: int, end: float, unless: str) -> None:
        """Return when ``count`` ranks have called this; raises as `get`."""
        self._store.add(key, 1)
        self._poll(lambda: self._store.add(key, 0) >= count, key, end, unless)

    def _poll(self, has_come: Callable[[], bool], key: str, end: float, unless: str) -> None:
        """Poll the store: torch logs a warning for each wait in it that times out, however short."""
        pauses = (min(LONGEST_PAUSE, 0.001 * 1.2**turn) for turn in itertools.count())
        while not has_come():
            if unless and self._store.check([unless]):
                if has_come():  # since the last look, and before that word
                    return
                raise Overtaken(unless)
            if time.monotonic() > end:
                raise TimeoutError(key)
            time.sleep(next(pauses))

    def wait(self, keys: list[str], check: Callable[[], None]) -> None:
        """Return when all these messages are there; call ``check``, which may raise, from time to time before that.

        Raises torch's DistStoreError after `TIMEOUT`.
        """
        end, patience = time.monotonic() + TIMEOUT.total_seconds(), GLANCE
        while True:
            try:
                self._store.wait(keys, patience)
                return
            except RuntimeError as error:  # each kind of store has its own for this
                if "timeout" not in str(error).lower() or time.monotonic() > end:
                    raise
            patience = min(2 * patience, LONGEST_GLANCE)
            check()

    def remove(self, key: str) -> None:
        """Remove a message that everybody has read, or what `barrier` has left."""
        self._store.delete_key(key)  # the result means nothing: a FileStore always returns True
        for number in itertools.count(1):
            if not self._store.check([f"{key}/{number}"]):
                return
            self._store.delete_key(f"{key}/{number}")

    def has(self, key: str) -> bool:
        """Return whether there is a message under a key."""
        found: bool = self._store.check([key])
        return found

    def word(self, key: str) -> str | None:
        """The short word under a key; None if there is none. One round trip to the store."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def put_word(self, key: str, word: str) -> str:
        """Set a short word, visible to all ranks on return, unless one is set; returns the one that is."""
        first: bytes = self._store.compare_set(key, "", word)
        return first.decode()


class Agreement:
    """A collective of all ranks over the store of the default process group: no tensors, no pickles.

    Each rank calls it, in the same order. Agreements of other names are independent of it: between sending a value in
    one and its answers, another may be used.
    """

    _rounds: ClassVar[defaultdict[tuple[str, str], Iterator[int]]] = defaultdict(itertools.count)

    def __init__(self, name: str, of: str = "") -> None:
        """Make an agreement; a rank that leaves the one named ``of``, if given, leaves this one, too.

        All ranks make it, and their first one together; raises torch's DistStoreError if a rank does not come.
        """
        self._name, self._of = name, of or name
        met, stores = job_stores(name, f"{self._of}/left")
        self._mailbox, self._departures = map(StoreMailbox, stores)
        self._round = self._rounds[met, name]

    def send(self, value: Any) -> Answers:
        """Send this rank's value (JSON) without waiting; returns a function that waits for the values of all ranks.

        Call the function once, before the next `send`; its values are in the order of ranks. It raises torch's
        DistStoreError if a rank does not come, or PeerDeparted.
        """
        rank, number = dist.get_rank(), next(self._round)
        keys = [f"{number}/{each}" for each in range(dist.get_world_size())]
        forget = forgetting_addresses() if number == 0 else None
        self._mailbox.put(keys[rank], value)

        def answers() -> list[Any]:
            self._mailbox.wait(keys, partial(self._check_departures, keys))
            values = [self._mailbox.read(key) for key in keys]
            if number:  # a rank that sent a value in this round has received those of the one before
                self._mailbox.remove(f"{number - 1}/{rank}")
            if forget is not None:
                forget()
            return values

        return answers

    def _check_departures(self, keys: list[str]) -> None:
        if not self._departures.has(ANY):  # one question, as long as all are here
            return
        gone = [rank for rank in range(len(keys)) if self._departures.has(str(rank))]
        if lacking := [rank for rank in gone if not self._mailbox.has(keys[rank])]:
            raise PeerDeparted(f"rank {lacking[0]} has closed")

    def gather(self, value: Any) -> list[Any]:
        """The values that all ranks send (JSON), in the order of ranks; raises as the answers of `send`."""
        return self.send(value)()

    def sibling(self, name: str) -> "Agreement":
        """Another agreement of the same ranks, which may be used while answers of this one are outstanding."""
        return Agreement(f"{self._name}/{name}", self._of)

    def leave(self) -> None:
        """Leave this agreement and its siblings: a rank that waits for this one gets `PeerDeparted`."""
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be gone, as the others are then
            self._departures.put_word(str(dist.get_rank()), "left")
            self._departures.put_word(ANY, "left")


class SingleRank(Agreement):
    """The agreement of a job of one rank, without a process group."""

    def __init__(self) -> None:
        """Make an agreement that needs no store."""

    def send(self, value: Any) -> Answers:
        """The value of the one rank, as the others would receive it."""
        sent = json.dumps(value)
        return lambda: [json.loads(sent)]

    def sibling(self, name: str) -> Agreement:
        """Return the same agreement, which has no state."""
        return self

    def leave(self) -> None:
        """Do nothing: no other rank waits."""


class Departures:
    """Ranks of several nodes that have closed and lend nothing, of one checkpoint directory.

    They announce it in the store that formed the process group: one message for all of them. On one node the saver
    knows by itself; before a load, which several nodes need to save, there are none.
    """

    def __init__(self, directory: str, place: RankInfo) -> None:
        self._key = hashlib.sha256(directory.encode()).hexdigest()[:16]
        self._place = place
        self._found: dict[int, Sequence[int]] = {}

    def announce(self, history: int, last: SaveId | None) -> None:
        """Announce that this rank has closed after its last save; the first announcement counts."""
        if (mailbox := self._mailbox()) is None:
            return
        word = [self._place.rank, *(last or SaveId(history, 0))]
        with contextlib.suppress(dist.DistError, RuntimeError):  # the others have ended, and the store with them
            mailbox.put_word(f"{history}", json.dumps(word))

    def found(self, history: int) -> Sequence[int]:
        """Rank, history and step of the last save of one that has closed; empty while none has.

        One question to the store for each save, from the first rank of each node alone.
        """
        if history in self._found or self._place.local_rank or (mailbox := self._mailbox()) is None:
            return self._found.get(history, ())
        with contextlib.suppress(dist.DistError, RuntimeError):
            if word := mailbox.word(f"{history}"):
                self._found = {history: json.loads(word)}
        return self._found.get(history, ())

    def _mailbox(self) -> StoreMailbox | None:
        store = job_store_if_met(f"closed/{self._key}")
        return None if store is None else StoreMailbox(store)


def agreement(world_size: int, name: str = "resume") -> Agreement:
    """The agreement of this job's ranks of this name; raises FastckptError if there is no process group yet."""
    if world_size == 1:
        return SingleRank()
    if not dist.is_initialized():
        raise FastckptError(
            f"load_checkpoint() and resume() are agreements of all {world_size} ranks: call "
            f"torch.distributed.init_process_group() first, on every rank"
        )
    return Agreement(name)


def check_alike(options: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError unless all ranks have the same options."""
    for name in options[0]:
        given = [each[name] for each in options]
        if len(set(given)) > 1:
            raise ConfigError(f"{name} must be the same on all ranks; rank by rank it is {given[:8]}")
