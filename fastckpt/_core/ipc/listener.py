"""Sockets at which agents listen for those of other hosts, by IPv4 and IPv6."""

import contextlib
import socket

BACKLOG = 1024
"""Connections that the kernel accepts while the process does not run."""


def listen(host: str = "") -> socket.socket:
    """A socket that listens at a local address, empty for all of this host, and a port that the kernel chooses."""
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be known to the kernel, and off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def without_prefix(address: str) -> str:
    """The address of the other end of a connection as people write it: an IPv4 one without the prefix that IPv6 has."""
    return address.removeprefix("::ffff:")
