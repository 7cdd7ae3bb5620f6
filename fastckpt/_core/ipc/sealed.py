"""A TCP connection between two agents that know the job's secret: JSON messages that nobody else can make or repeat.

Each side proves with HMAC-SHA256 over a nonce of the other that it has the secret (RFC 2104; the secret itself is never
sent). A message carries an HMAC over its direction, its number and its bytes. The bytes of files are not sealed: the
message that follows them has their digest.
"""

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from fastckpt.errors import FastckptError, ProtocolError

MAX_SIZE = 4 << 20
"""The longest message in bytes; that of a stranger may have `MAX_GREETING`."""
MAX_GREETING = 1 << 10
GREETING_TIMEOUT = 5.0
"""Seconds that the other side has to prove that it knows the secret."""
BLOCK = 256 << 10
"""Bytes of a file that are received at once: they are digested while they are in the processor's cache."""
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_MAC = hashlib.sha256().digest_size
_CLIENT, _SERVER = b"client", b"server"


class Rate(Protocol):
    """A limit on bytes per second: for each ``portion``, `reserve` returns the seconds to wait before it is sent."""

    portion: int

    def reserve(self, count: int) -> float: ...


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise ProtocolError for all errors of a message with missing parts, or parts of other kinds than expected."""
    try:
        yield
    except FastckptError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ProtocolError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


class SealedConnection:
    """One end of a connection; one thread at a time uses it. Any error closes it for good."""

    def __init__(self, connected: socket.socket, key: bytes, *, is_client: bool) -> None:
        self._socket = connected
        self._key = key
        self._out, self._in = (_CLIENT, _SERVER) if is_client else (_SERVER, _CLIENT)
        self._sent = self._received = 0
        self._aborted = threading.Event()

    @classmethod
    def connect(cls, address: str, secret: bytes, timeout: float, *, later: float | None = None) -> Self:
        """Connect to the agent at HOST:PORT.

        Args:
            address: HOST:PORT.
            secret: That of the job.
            timeout: Seconds that it has to answer, and to prove that it knows the secret.
            later: Seconds that each later wait may take; by default as many.

        Raises:
            OSError: Nobody answers there.
            ProtocolError: Whoever answers does not know the secret.
        """
        host, _, port = address.rpartition(":")
        connected = socket.create_connection((host.strip("[]"), int(port)), timeout)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(connected.close)
            theirs = bytes.fromhex(_text(_greeting(connected), "nonce"))
            ours = secrets.token_bytes(16)
            _send(connected, {"nonce": ours.hex(), "proof": _proof(secret, _CLIENT, theirs, ours).hex()})
            proof = bytes.fromhex(_text(_greeting(connected), "proof"))
            if not hmac.compare_digest(proof, _proof(secret, _SERVER, ours, theirs)):
                raise ProtocolError(f"the process at {address} does not know the secret of this job")
            connected.settimeout(timeout if later is None else later)
            connection = cls(connected, _proof(secret, b"session", theirs, ours), is_client=True)
            on_failure.pop_all()
        return connection

    @classmethod
    def accept(cls, connected: socket.socket, secret: bytes, timeout: float) -> Self:
        """Let the process at the other end prove that it knows the secret; raises as `connect`."""
        deadline = time.monotonic() + GREETING_TIMEOUT
        connected.settimeout(GREETING_TIMEOUT)
        ours = secrets.token_bytes(16)
        _send(connected, {"nonce": ours.hex()})
        greeting = _greeting(connected, deadline)
        theirs, proof = (bytes.fromhex(_text(greeting, name)) for name in ("nonce", "proof"))
        if not hmac.compare_digest(proof, _proof(secret, _CLIENT, ours, theirs)):
            raise ProtocolError("it does not know the secret of this job")
        _send(connected, {"proof": _proof(secret, _SERVER, theirs, ours).hex()})
        connected.settimeout(timeout)
        return cls(connected, _proof(secret, b"session", ours, theirs), is_client=False)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; raises OSError or ProtocolError."""
        data = json.dumps(message).encode()
        if len(data) > MAX_SIZE:
            raise ProtocolError(f"a message of {len(data)} bytes is longer than {MAX_SIZE}")
        self._socket.sendall(_LENGTH.pack(len(data)) + self._mac(self._out, self._sent, data) + data)
        self._sent += 1

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if the other end has hung up. Raises OSError or ProtocolError."""
        head = self._exactly(_LENGTH.size, or_nothing=True)
        if not head:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_SIZE:
            raise ProtocolError(f"a message of {length} bytes is longer than {MAX_SIZE}")
        mac, data = self._exactly(_MAC), self._exactly(length)
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, data)):
            raise ProtocolError("a message was forged, repeated or left out")
        self._received += 1
        return _object(data)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and receive the answer; raises ProtocolError with the reason if it was refused."""
        self.send(message)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Receive an answer; raises as `ask`."""
        answer = self.receive()
        if answer is None:
            raise ProtocolError("the other agent has hung up")
        if "refused" in answer:
            raise ProtocolError(str(answer["refused"]))
        return answer

    def send_bytes(self, data: bytes | bytearray) -> None:
        """Send bytes that are not sealed."""
        self._socket.sendall(data)

    def send_file(self, path: Path, size: int, rate: Rate | None = None, *, start: int = 0) -> None:
        """Send bytes of a file, from ``start`` on, without copying them (sendfile), if need be at a limited rate.

        Raises OSError if it has fewer, and in a wait for the rate if the connection was aborted.
        """
        with path.open("rb") as file:
            self.send_open_file(file, size, rate, start=start)

    def send_open_file(self, file: BinaryIO, size: int, rate: Rate | None = None, *, start: int = 0) -> None:
        """Send bytes of a file that is open, as `send_file`."""
        portion = rate.portion if rate else size
        if os.fstat(file.fileno()).st_size < start + size:
            raise OSError(f"{file.name} has fewer than {start + size} bytes")
        for offset in range(start, start + size, max(1, portion)):
            count = min(portion, start + size - offset)
            if rate and self._aborted.wait(rate.reserve(count)):
                raise OSError("the connection was given up in the middle of a file")
            if self._socket.sendfile(file, offset, count) != count:
                raise OSError(f"{file.name} has fewer than {start + size} bytes")

    def receive_bytes(self, size: int) -> bytes:
        """Receive so many bytes that are not sealed."""
        return bytes(self._exactly(size))

    def receive_into(self, view: memoryview) -> int:
        """Receive some bytes, at most `BLOCK`, into memory; returns how many. Raises ProtocolError at the end."""
        count = self._socket.recv_into(view[:BLOCK])
        if not count:
            raise ProtocolError("the other agent has hung up in the middle of a file")
        return count

    def abort(self) -> None:
        """Make whatever another thread does with this connection fail at once."""
        self._aborted.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _mac(self, direction: bytes, number: int, data: bytes) -> bytes:
        return hmac.digest(self._key, direction + _NUMBER.pack(number) + data, "sha256")

    def _exactly(self, size: int, *, or_nothing: bool = False) -> bytes:
        return _exactly(self._socket, size, or_nothing=or_nothing)


def _proof(secret: bytes, role: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, b"fastckpt " + role + challenge + own, "sha256")


def _send(connected: socket.socket, message: dict[str, str]) -> None:
    data = json.dumps(message).encode()
    connected.sendall(_LENGTH.pack(len(data)) + data)


def _greeting(connected: socket.socket, deadline: float = math.inf) -> dict[str, Any]:
    """A message of somebody who has proved nothing yet; raises OSError, too, if it is not whole by the deadline."""
    (length,) = _LENGTH.unpack(_exactly(connected, _LENGTH.size, deadline=deadline))
    if length > MAX_GREETING:
        raise ProtocolError("it does not speak as the agents of this job do")
    return _object(_exactly(connected, length, deadline=deadline))


def _exactly(connected: socket.socket, size: int, *, or_nothing: bool = False, deadline: float = math.inf) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline < math.inf:  # a stranger that sends byte after byte would keep its place for hours
            connected.settimeout(max(1e-3, deadline - time.monotonic()))
        chunk = connected.recv(min(size - len(data), BLOCK))
        if not chunk and or_nothing and not data:
            return b""
        if not chunk:
            raise ProtocolError(f"it has hung up after {len(data)} of {size} bytes")
        data += chunk
    return bytes(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {data[:80]!r}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"not a message: {data[:80]!r}")
    return message


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) % 2 or set(value) - set("0123456789abcdef"):
        raise ProtocolError("it does not speak as the agents of this job do")
    return value
