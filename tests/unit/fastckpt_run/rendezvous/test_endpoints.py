"""The address that a node announces: numeric, and of an interface by which others reach it."""

import errno
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from fastckpt_run.rendezvous import endpoints
from fastckpt_run.rendezvous.endpoints import Endpoints


class Interfaces(AbstractContextManager["Interfaces"]):
    """Sockets of a host with some addresses, by the last of which it reaches all others."""

    own: Sequence[str] = ()

    def __init__(self, *_: object) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def bind(self, address: tuple[str, int]) -> None:
        if address[0] not in self.own:
            raise OSError(errno.EADDRNOTAVAIL, "not of this host")

    def connect(self, _: object) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return self.own[-1], 0


TABLE = [
    (("10.0.0.1",), ("10.0.0.1",), "10.0.0.1"),
    (("fd00::1",), ("fd00::1",), "fd00::1"),
    (("127.0.1.1", "10.0.0.1"), ("10.0.0.1",), "10.0.0.1"),  # a line for each in /etc/hosts
    (("fe80::1%eth0", "::1", "fd00::1"), ("fe80::1%eth0", "fd00::1"), "fd00::1"),
    (("10.9.9.9", "10.0.0.1"), ("10.0.0.1",), "10.0.0.1"),  # the first is stale, or of a router
    (("172.17.0.1", "10.0.0.1"), ("172.17.0.1", "10.0.0.1"), "10.0.0.1"),  # a bridge for containers, on each host alike
    (("10.0.0.1", "fd00::1"), ("10.0.0.1", "fd00::1", "10.5.5.5"), "10.0.0.1"),
    (("127.0.1.1",), ("10.0.0.1",), "node1"),  # Debian's: others know the name
    (("10.9.9.9",), ("10.0.0.1",), "node1"),
    ((), ("172.17.0.1", "10.0.0.1"), "10.0.0.1"),
]


def test_the_own_address_is_numeric_where_the_name_leads_others_here(monkeypatch):
    def getaddrinfo(host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        found = ("10.0.0.7",) if host == "node0" else known
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0)) for each in found]

    monkeypatch.setattr(endpoints.socket, "getfqdn", lambda: "node1")
    monkeypatch.setattr(endpoints.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(endpoints.socket, "socket", Interfaces)
    for known, Interfaces.own, announced in TABLE:
        own = Endpoints("node0,node1", is_here=lambda name: name == "node1").own_address()
        assert own == announced, (known, Interfaces.own)
