"""Where agents listen."""

import socket

import pytest

from fastckpt._core.ipc.listener import listen, without_prefix

ADDRESSES = ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6"))]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("is_for_all", [True, False])
def test_an_agent_is_reached_by_ipv4_and_by_ipv6_and_knows_by_whom(address: str, is_for_all: bool) -> None:
    with listen("" if is_for_all else address) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((address, port), timeout=10) as client:
            accepted, (host, *_) = listener.accept()
            with accepted:
                accepted.sendall(b"here")
                assert client.recv(4) == b"here"
                assert without_prefix(host) == address
