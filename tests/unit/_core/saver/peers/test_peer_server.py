"""The server for other agents, which has to be there after times in which nobody could be served."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from fastckpt._core.saver.peers import peer_server
from fastckpt._core.saver.peers.peer_server import PeerServer
from tests.unit._core.saver.descriptors import no_descriptors
from tests.unit._core.saver.peers.agents import SECRET, link_to


@pytest.fixture
def server() -> Iterator[PeerServer]:
    with closing(PeerServer({"echo": lambda connection, request: {"back": request["say"]}})) as made:
        made.set_secret(SECRET)
        yield made


def echo(server: PeerServer, say: str) -> object:
    with link_to(f"127.0.0.1:{server.port}") as link:
        return link.ask({"ask": "echo", "say": say})["back"]


@contextmanager
def no_thread_left() -> Iterator[None]:
    """No thread can be started."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(threading.Thread, "start", refuse)
        yield


@pytest.mark.parametrize("shortage", [no_descriptors, no_thread_left])
def test_an_agent_without_descriptors_or_threads_serves_others_once_it_has_some(
    server: PeerServer, shortage: Any
) -> None:
    assert echo(server, "before") == "before"
    with socket.socket() as waiting, shortage():
        waiting.settimeout(10.0)
        waiting.connect(("127.0.0.1", server.port))
        waiting.recv(1)  # the kernel had a descriptor for the first one already
        time.sleep(3 * peer_server.PAUSE)
    for number in range(peer_server.STRANGERS + 1):  # no place is kept
        assert echo(server, str(number)) == str(number)


def test_a_stranger_is_refused_by_its_address_in_the_log_once(server: PeerServer, caplog: pytest.LogCaptureFixture):
    for address in ("127.0.0.1", "127.0.0.1", "::1"):
        with socket.create_connection((address, server.port), 10) as stranger, suppress(ConnectionError):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(4096):
                pass
    refused = [record.args for record in caplog.records if record.msg.startswith("refused an agent at")]
    assert [args[0] for args in refused] == ["127.0.0.1", "::1"]  # type: ignore[index]
    assert echo(server, "after") == "after"
