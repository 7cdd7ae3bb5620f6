"""Connection to a TCPStore on a host that may fall silent: each call has a deadline."""

import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

SILENCE = 7.0
"""Seconds after which a store that does not answer counts as silent.

torch's server looks up a name for each client that connects, and answers nobody meanwhile: a question that a name
server loses takes 5 s. A host that was found dead need not be waited for so long: see `StoreConnection.give_up`.
"""
_NOTHING = "-"
T = TypeVar("T")
_blocked: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_adding = threading.Lock()


class StoreLost(Exception):
    """A store cannot be reached any more.

    Attributes:
        ended: True if its host has ended the connection; if not, it is silent, and may be there.
    """

    def __init__(self, text: str, *, ended: bool) -> None:
        super().__init__(text)
        self.ended = ended


class _Lost(NamedTuple):
    why: str
    ended: bool


def threads_end(timeout: float) -> bool:
    """Return whether all threads end, in so many seconds each, that wait for stores which have not answered."""
    with _adding:
        threads = list(_blocked)
    for thread in threads:
        thread.join(timeout)
    return not any(thread.is_alive() for thread in threads)


def reached(connect: Callable[[], T], pause: float, goes_on: Callable[[], bool]) -> T | None:
    """Return the result of ``connect``; None as soon as ``goes_on``, asked every ``pause`` seconds, is false.

    Raises StoreLost.

    torch looks names up, and waits for a first answer, without a deadline: one that comes too late is left behind.
    """
    answer: queue.SimpleQueue[T | _Lost] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(connect())
        except StoreLost as lost:
            answer.put(_Lost(str(lost), lost.ended))

    thread = threading.Thread(target=run, name="fastckpt-reach", daemon=True)
    thread.start()
    with _adding:
        _blocked.add(thread)
    while True:
        try:
            found = answer.get(timeout=pause)
        except queue.Empty:
            if not goes_on():
                return None
        else:
            if isinstance(found, _Lost):
                raise StoreLost(found.why, ended=found.ended)
            return found


class StoreConnection:
    """A client of a TCPStore, for several threads.

    torch has deadlines for some calls only, and blocks in C++, where no signal is handled. Each call therefore runs in
    a thread of the connection. One that does not return in time is left behind, with the connection.

    Attributes:
        host: The host of the store.
        port: Its port.
        calls: The number of calls by their names.
    """

    def __init__(self, host: str, port: int, calls: Counter[str] | None = None) -> None:
        """Connect; raises StoreLost."""
        self.host, self.port = host, port
        self.calls = Counter[str]() if calls is None else calls
        # No exception is kept: its traceback would keep all stores of all frames, and their sockets.
        self._lost: _Lost | None = None
        self._lock = threading.Lock()
        self._answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="fastckpt-store", daemon=True)
        self._thread.start()
        patience = timedelta(seconds=SILENCE)
        connect = partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=patience)
        self._client: TCPStore = self._run(connect, SILENCE)

    def peek(self, key: str) -> bytes | None:
        """A value; None if there is none."""
        # torch's own `get` would wait for one.
        found = self._call("compare_set", key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else bytes(found)

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._call("set", key, value)

    def set_all(self, keys: list[str], value: bytes) -> None:
        """Set several keys to one value."""
        if keys:
            self._call("multi_set", keys, [value] * len(keys))

    def replace(self, key: str, old: bytes | None, new: bytes) -> bytes:
        """Set a value if it is still ``old``; returns the value that is there then."""
        return bytes(self._call("compare_set", key, (old or b"").decode("utf-8", "replace"), new.decode()))

    def add(self, key: str, number: int) -> int:
        """Add to a counter; returns its value."""
        return int(self._call("add", key, number))

    def append(self, key: str, value: bytes) -> None:
        """Append to a value."""
        self._call("append", key, value.decode())

    def delete(self, key: str) -> None:
        """Delete a value, if there is one."""
        self._call("delete_key", key)

    def has_all(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return bool(self._call("check", keys)) if keys else True

    def get_all(self, keys: list[str]) -> list[bytes]:
        """The values of keys that all have one."""
        return [bytes(value) for value in self._call("multi_get", keys)] if keys else []

    def wait(self, key: str) -> None:
        """Wait until there is a value, for as long as it takes; no other call can be made meanwhile."""
        # No shorter time, time after time: torch prints two lines for each wait that was in vain.
        self._call("wait", [key], timedelta(days=365), timeout=None)

    def give_up(self, why: str) -> None:
        """End the connection to a host that is dead; a call that waits for it raises StoreLost at once."""
        self._lost = self._lost or _Lost(why, ended=True)
        self._answer.put(self._lost)
        self.close()

    def close(self) -> None:
        """End the connection; a thread that waits for an answer is left behind."""
        self._lost = self._lost or _Lost("it is not used any more", ended=True)
        self._work.put(None)
        with _adding:
            _blocked.add(self._thread)

    def _call(self, name: str, *arguments: Any, timeout: float | None = SILENCE) -> Any:
        self.calls[name] += 1
        with self._lock:
            return self._run(lambda: getattr(self._client, name)(*arguments), timeout)

    def _run(self, call: Callable[[], Any], timeout: float | None) -> Any:
        self._answer = answer = queue.SimpleQueue[Any]()
        result: Any = self._lost
        if result is None:
            self._work.put((call, answer))
            try:
                result = answer.get(timeout=timeout)
            except queue.Empty:
                result = _Lost(f"it has not answered for {timeout:g} s", ended=False)
        if isinstance(result, _Lost):
            self._lost = self._lost or result
            self.close()
            raise StoreLost(f"{self.host}:{self.port}: {result.why}", ended=result.ended)
        return result

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            call, answer = work
            try:
                answer.put(call())
            except RuntimeError as error:  # the base of all that torch raises here
                why = str(error).splitlines()[0][:200]
                answer.put(_Lost(why, ended="wait timeout" not in why))
            except (ValueError, TypeError) as error:  # a value that torch cannot read, which a stranger has put there
                answer.put(_Lost(str(error)[:200], ended=False))
            del work, call, answer
        self.__dict__.pop("_client", None)  # closes its socket
