"""Endpoints of a rendezvous: the hosts that may hold its store, of which the first that lives does."""

import ipaddress
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from fastckpt._core.error_codes import coded
from fastckpt_run.rendezvous.store_connection import StoreConnection, StoreLost

DEFAULT_PORT = 29400
"""torch's own."""
_PROBE, _PROBE_OF_LOST = 0.7, 0.2
"""Seconds that a host has to accept a connection, and one that was found dead: another may have come in its place."""
_LOOK = 0.1
_HEARD = 0.5
"""Seconds that a store has to answer after another one did."""
_FIRST_TURN = 1.0
_LATER_TURN = 0.3
"""Seconds that a host leaves to each of those before it in the list, before it holds the store itself."""
_REFERRED = -1
"""The number of the place to which others have referred this node: it is in no list."""


class _Looks:
    """Answers of endpoints: rounds, number of the endpoint, and a connection. Those that come too late are closed."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[int, int, StoreConnection | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_over = False

    def put(self, look: tuple[int, int, StoreConnection | None]) -> None:
        with self._lock:
            if not self._is_over:
                self.queue.put(look)
                return
        if look[2] is not None:
            look[2].close()

    def end(self) -> None:
        with self._lock:
            self._is_over = True
        with suppress(queue.Empty):
            while True:
                if (connection := self.queue.get_nowait()[2]) is not None:
                    connection.close()


class Endpoints:
    """Hosts that may hold the store of a job.

    Attributes:
        server: The store that this process holds; None if it holds none.
    """

    def __init__(
        self,
        text: str,
        *,
        is_here: Callable[[str], bool],
        is_host: bool | None = None,
        calls: Counter[str] | None = None,
    ) -> None:
        """Read a list such as ``a:29400,b``; raises ValueError.

        Args:
            text: Hosts with or without ports, with commas in between.
            is_here: Returns whether a name or an address is this host's.
            is_host: Whether this process may hold the store; None to go by `is_here`.
            calls: Counter of the stores' calls.
        """
        texts = (text or "").split(",")
        if len(texts) > 1 and not all(each.strip() for each in texts):
            raise ValueError(f"the list of endpoints {text!r} has an empty one; write it as a:29400,b:29400")
        self._list = [parse_rendezvous_endpoint(each.strip(), DEFAULT_PORT) for each in texts]
        alone = len(self._list) == 1
        self._own = [
            number
            for number, (host, _) in enumerate(self._list)
            if is_host is not False and ((alone and is_host) or is_here(host))
        ]
        self._demanded = bool(is_host and alone)
        self._calls = calls
        self._lost: int | None = None
        self._held = ("", 0)
        self._referred: tuple[str, int] | None = None
        self.server: TCPStore | None = None

    def __len__(self) -> int:
        return len(self._list)

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self._list)

    def places(self) -> list[tuple[str, int, bool]]:
        """Host and port of each, and whether this process may hold the store there."""
        return [(host, port, number in self._own) for number, (host, port) in enumerate(self._list)]

    def own_address(self) -> str:
        """The address by which other nodes reach this one, numeric if possible: a name may lead them elsewhere.

        That of its name, if it leads here from others; the name, if it has another one; else one that leads to them.
        """
        name = socket.getfqdn()
        known = addresses_of(name)
        own = [each for each in known if _is_of_interface(each)]
        for host, port, is_here in self.places() if len(own) > 1 or not known else ():
            with suppress(OSError):
                found = host if is_here else source_of(host, port)
                if not known or found in own:
                    return found
        return own[0] if own else name

    def connect(
        self, rounds_in: Callable[[StoreConnection], int], timeout: float, *, hold: bool = True
    ) -> StoreConnection:
        """Connect to the store of the job, or hold one; raises RendezvousConnectionError after ``timeout`` seconds.

        Of several stores the one with the most rounds of the job counts: a host that comes back joins the store that
        the others have made meanwhile.

        Args:
            rounds_in: The number of rounds that the job has had in a store; may raise StoreLost.
            timeout: Seconds to wait for a store.
            hold: True if this process may hold one.
        """
        begin = time.monotonic()
        turn = _FIRST_TURN if self._lost is None else _LATER_TURN
        while True:
            found = self.best(rounds_in)
            if found is not None:
                return found
            waited = time.monotonic() - begin
            # A host that was lost need not be waited for.
            before = [number for number in range(min(self._own, default=0)) if number != self._lost]
            if hold and self._own and waited >= turn * len(before) and self._hold():
                continue
            if waited >= timeout:
                raise RendezvousConnectionError(
                    coded(
                        f"no store of the rendezvous answers at {self} after {timeout:g} s{self._unknown()}, and this "
                        "host can hold none. Name an endpoint on which an agent runs, or several with commas in "
                        "between (--rdzv-endpoint)",
                        "FC-037",
                    )
                )
            time.sleep(_LOOK)

    def best(self, rounds_in: Callable[[StoreConnection], int]) -> StoreConnection | None:
        """A connection to the living store with the most rounds, the first of several; None if none lives."""
        looks = _Looks()
        places = self._numbered()
        for number, place in places:
            look = partial(self._look, number, place, rounds_in, looks)
            threading.Thread(target=look, name="fastckpt-endpoint", daemon=True).start()
        found = dict[tuple[int, int], StoreConnection]()
        with suppress(queue.Empty):
            for _ in places:  # one that accepts and does not answer delays others only for a moment
                rounds, number, connection = looks.queue.get(timeout=_HEARD if found else None)
                if connection is not None:
                    found[-rounds, number] = connection
        looks.end()
        best = found.pop(min(found)) if found else None
        for other in found.values():
            other.close()
        return best

    def others(self) -> Iterator[tuple[StoreConnection, bool]]:
        """Stores at other endpoints than that of the one that this process holds, and whether it comes before them."""
        own = self._list.index(self._held)
        for number, place in enumerate(self._list):
            if number != own:
                with suppress(OSError, StoreLost), closing(self._opened(number, place)) as connection:
                    yield connection, own < number

    def refer(self, host: str, port: int) -> None:
        """Look from now on at a place, too, that is in no list; at the last one of several."""
        self._referred = host, port

    def holds(self, connection: StoreConnection) -> bool:
        """Return whether this process holds the store of a connection; if not, it holds none any more."""
        if self.server is not None and not self.is_own(connection):
            self.server = None  # its users see that it has ended, and find the other one
        return self.server is not None

    def is_own(self, connection: StoreConnection) -> bool:
        """Return whether a connection leads to the store that this process has held last."""
        return (connection.host, connection.port) == self._held

    def lost(self, connection: StoreConnection) -> None:
        """Note that a store is gone: its host has no turn any more."""
        place = connection.host, connection.port
        self._lost = next((number for number, each in self._numbered() if each == place), _REFERRED)

    def _numbered(self) -> list[tuple[int, tuple[str, int]]]:
        return [*enumerate(self._list), *([(_REFERRED, self._referred)] if self._referred else [])]

    def _opened(self, number: int, place: tuple[str, int]) -> StoreConnection:
        """A connection to the store at a place; raises OSError or StoreLost if there is none."""
        # torch's client prints a stack for each attempt that fails, so ask first whether a server listens.
        patience = _PROBE_OF_LOST if number == self._lost else _PROBE
        with closing(socket.create_connection(place, timeout=patience)):
            pass
        return StoreConnection(*place, calls=self._calls)

    def _look(
        self,
        number: int,
        place: tuple[str, int],
        rounds_in: Callable[[StoreConnection], int],
        looks: "_Looks",
    ) -> None:
        try:
            connection = self._opened(number, place)
        except (OSError, StoreLost):
            looks.put((0, number, None))
            return
        try:
            looks.put((rounds_in(connection), number, connection))
        except StoreLost:
            connection.close()
            looks.put((0, number, None))

    def _unknown(self) -> str:
        """Describe the hosts that have no address here; empty if there are none."""
        unknown = []
        for host, port in self._list:
            try:
                socket.getaddrinfo(host, port)
            except OSError:
                unknown.append(host)
        return f" ({', '.join(unknown)}: no such name on this host)" if unknown else ""

    def _hold(self) -> bool:
        """Hold a store at the first own endpoint that is free; returns whether that was possible."""
        for number in self._own:
            host, port = self._list[number]
            with suppress(RuntimeError):  # of two agents on one host only one can
                self.server = TCPStore(
                    host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
                )
                self._list[number] = self._held = (host, self.server.port)
                return True
        if self._demanded:
            text = f"no store can be held at {self}, where is_host demands one: is it in use?"
            raise RendezvousConnectionError(coded(text, "FC-037"))
        return False


def addresses_of(name: str) -> list[str]:
    """The numeric addresses of a name on this host, in the order of its resolver; none if it does not know it."""
    with suppress(OSError):
        return [*dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))]
    return []


def source_of(host: str, port: int) -> str:
    """The address of the interface that leads to a host; raises OSError."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _is_of_interface(address: str) -> bool:
    """Return whether a numeric address is one of this host that leads other hosts to it."""
    found = ipaddress.ip_address(address)
    if found.is_loopback or found.is_link_local or found.is_unspecified:
        return False
    with suppress(OSError), socket.socket(socket.AF_INET6 if found.version == 6 else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return True
    return False
