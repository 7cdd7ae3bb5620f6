"""Connections between agents: who does not know the secret is refused, and no message can be forged or repeated."""

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from fastckpt._core.io.rate import RateLimit
from fastckpt._core.ipc import sealed
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt.errors import ProtocolError
from tests.support.tables import for_each

SECRET = b"secret"
Pair = tuple[SealedConnection, SealedConnection]


def connect(secret: bytes = SECRET, greet: Callable[[socket.socket], None] | None = None) -> Pair:
    """Both ends of a connection over TCP; ``greet`` may take the client's part. Raises what the server raises."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address, client = listener.getsockname(), []

        def dial() -> None:
            with suppress(OSError, ProtocolError):
                if greet is None:
                    client.append(SealedConnection.connect(f"127.0.0.1:{address[1]}", secret, 10))
                else:
                    with socket.create_connection(address, 10) as plain:
                        greet(plain)

        thread = threading.Thread(target=dial)
        thread.start()
        accepted, _ = listener.accept()
        try:
            server = SealedConnection.accept(accepted, SECRET, 10)
        except BaseException:
            accepted.close()
            raise
        finally:
            thread.join()
        return client[0], server


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = connect()
    yield both
    for end in both:
        end.close()


def test_a_client_or_server_that_does_not_know_the_secret_is_refused():
    with pytest.raises(ProtocolError, match="does not know the secret"):
        connect(b"another")
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            accepted, _ = listener.accept()
            with accepted:
                sealed._send(accepted, {"nonce": "00" * 16})
                sealed._greeting(accepted)
                sealed._send(accepted, {"proof": "00" * 32})

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match="does not know the secret"):
            SealedConnection.connect(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, 10)
        thread.join()


def said_by_a_stranger(data: bytes) -> Callable[[socket.socket], None]:
    def greet(plain: socket.socket) -> None:
        plain.sendall(data)
        plain.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            plain.recv(1)

    return greet


def test_what_was_said_in_another_connection_proves_nothing(monkeypatch: pytest.MonkeyPatch):
    """A client that repeats the greeting that it has overheard."""
    overheard: list[bytes] = []
    real = sealed._send

    def record(connected: socket.socket, message: dict[str, str]) -> None:
        if "proof" in message and "nonce" in message:
            overheard.append(json.dumps(message).encode())
        real(connected, message)

    with monkeypatch.context() as patched:
        patched.setattr(sealed, "_send", record)
        for end in connect():
            end.close()
    with pytest.raises(ProtocolError, match="does not know the secret"):
        connect(greet=said_by_a_stranger(struct.pack("<I", len(overheard[0])) + overheard[0]))


@for_each(
    b"GET / HTTP/1.1\r\n\r\n",
    struct.pack("<I", 1 << 30),
    struct.pack("<I", 2) + b"[]",
    struct.pack("<I", 31) + b'{"nonce": "zz", "proof": "0000"}'[:31],
    b"\x00",
)
def test_what_a_stranger_sends_is_refused(greeting: bytes):
    with pytest.raises(ProtocolError):
        connect(greet=said_by_a_stranger(greeting))


def _frame(message: bytes, mac: bytes) -> bytes:
    return struct.pack("<I", len(message)) + mac + message


@pytest.mark.parametrize("fault", ["forged", "repeated", "turned back", "changed", "too long", "cut short"])
def test_a_message_that_the_other_end_has_not_sent_now_is_refused(pair: Pair, fault: str):
    client, server = pair
    data = b'{"number": 0}'
    mac = client._mac(client._out, 0, data)
    if fault == "repeated":
        client.send({"number": 0})
        assert server.receive() == {"number": 0}
    frames = {
        "forged": _frame(data, hashlib.sha256(data).digest()),
        "repeated": _frame(data, mac),
        "turned back": _frame(data, client._mac(client._in, 0, data)),
        "changed": _frame(data.replace(b"0", b"1"), mac),
        "too long": struct.pack("<I", sealed.MAX_SIZE + 1),
        "cut short": struct.pack("<I", 100) + b"x" * 50,
    }
    client._socket.sendall(frames[fault])
    if fault == "cut short":
        client.close()
    says = {"too long": "longer than", "cut short": "hung up"}.get(fault, "forged, repeated or left out")
    with pytest.raises(ProtocolError, match=says):
        server.receive()


def test_a_file_that_waits_for_its_rate_ends_at_once_if_the_connection_is_given_up(pair: Pair, tmp_path: Path):
    client, _ = pair
    (tmp_path / "file").write_bytes(bytes(2 << 20))
    slow = RateLimit(1 << 14)  # a minute from the first portion to the second
    threading.Timer(0.1, client.abort).start()
    since = time.monotonic()
    with pytest.raises(OSError, match="given up"):
        client.send_file(tmp_path / "file", 2 << 20, slow)
    assert time.monotonic() - since < 10


def test_a_stranger_that_sends_byte_after_byte_is_hung_up_on_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sealed, "GREETING_TIMEOUT", 0.2)

    def drip(plain: socket.socket) -> None:
        for byte in struct.pack("<I", sealed.MAX_GREETING) + b"x" * 20:
            plain.sendall(bytes([byte]))
            time.sleep(0.05)

    since = time.monotonic()
    with pytest.raises(TimeoutError):
        connect(greet=drip)
    assert time.monotonic() - since < 10
