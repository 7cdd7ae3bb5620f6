"""Ports of servers that tests start: none that the kernel gives to another test's client or server meanwhile."""

import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that the kernel chooses by itself."""


def free_port() -> int:
    """A TCP port at which nothing listens, drawn below the ephemeral ones.

    Of those, a port that was free a moment ago may be the source of somebody's connection before the server
    listens, even of the connection to that server: then it meets itself, and waits for ever.
    """
    first = int(EPHEMERAL.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(min(10_000, first // 2), first)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
