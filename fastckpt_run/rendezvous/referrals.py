"""Referrals to the store of the job, for nodes that wait in one of their own because names lead them to nobody."""

import ipaddress
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from fastckpt._core.error_codes import coded
from fastckpt_run.rendezvous.endpoints import Endpoints, addresses_of, source_of
from fastckpt_run.rendezvous.membership import Node
from fastckpt_run.rendezvous.round_store import RoundStore
from fastckpt_run.rendezvous.store_connection import StoreConnection, StoreLost

logger = logging.getLogger("fastckpt.launcher")

LOOK = 10.0
"""Seconds between two looks of the holder of a store for other stores of its job."""


class Referrals:
    """A thread that looks for other stores of the job while this node holds one, and leaves there where that is.

    A host whose names are out of date reaches nobody, holds a store of its own and waits there. The others may reach
    it. As for all nodes the store with more rounds counts, of two the first in the list: only to that one is referred.

    Args:
        node: This one.
        endpoints: The hosts that may hold the store.
        records: The records of the job; None if no store answers.
    """

    def __init__(self, node: Node, endpoints: Endpoints, records: Callable[[], RoundStore | None]) -> None:
        self._node, self._endpoints, self._records = node, endpoints, records
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastckpt-referrals", daemon=True)

    def begin(self) -> None:
        """Look from now on, if there are several endpoints."""
        if len(self._endpoints) > 1 and self._thread.ident is None:
            self._thread.start()

    def end(self, timeout: float) -> bool:
        """Look no more; False if the thread does not end in so many seconds."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(LOOK):
            with suppress(StoreLost, OSError, ValueError):  # a name may be no name
                self._look()

    def _look(self) -> None:
        records = self._records()
        if records is None or self._endpoints.server is None or not self._endpoints.is_own(records.connection):
            return
        last = records.last_round()
        for connection, is_first in () if last.is_closed else self._endpoints.others():
            with suppress(StoreLost):
                there = records.at(connection)
                # Empty: of another job, or secret. Our own: another name of this host.
                if there.holder() in ("", self._node.id):
                    continue
                found = there.last_round()
                if not found.is_closed and found.number < last.number + is_first:
                    address = self._address_for(connection.host, connection.port)
                    there.refer({"host": self._node.host, "address": address, "port": records.connection.port})

    def _address_for(self, host: str, port: int) -> str:
        """The numeric address of this host: the announced one, or that of the interface that leads to another."""
        announced = (each for each in addresses_of(self._node.address) if not ipaddress.ip_address(each).is_loopback)
        return next(announced, None) or source_of(host, port)


def referred(
    records: RoundStore, endpoints: Endpoints, rounds_in: Callable[[StoreConnection], int]
) -> StoreConnection | None:
    """The store with the most rounds, with that to which another node has referred this one; None without a referral.

    Args:
        records: Records in the store that this node holds.
        endpoints: The hosts that may hold the store, which have that place from now on.
        rounds_in: As for `Endpoints.best`.
    """
    match records.referral():
        case {"host": str(host), "address": str(address), "port": int(port)} if _is_place(address, port):
            endpoints.refer(address, port)
        case _:
            return None
    best = endpoints.best(rounds_in)
    if best is not None and (best.host, best.port) == (address, port):
        names = ", ".join(place for place, _, is_here in endpoints.places() if not is_here)
        text = (
            "this node reaches nobody of its job by %s: the others meet on host %s, at %s:%d, as that one has noted in "
            "the store here. Correct these names on this host, in DNS or /etc/hosts"
        )
        logger.warning(coded(text, "FC-036"), names, host, address, port)
    return best


def _is_place(address: str, port: int) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(address)) and 0 < port < 1 << 16
    return False
