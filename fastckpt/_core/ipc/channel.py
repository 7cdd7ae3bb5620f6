"""Both ends of the connection between a writer and the saver, and the check of messages on arrival."""

import array
import asyncio
import fcntl
import json
import os
import socket
import struct
import termios
import threading
import time
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Union, get_args, get_origin

from fastckpt._core.descriptors import opened
from fastckpt._core.error_codes import coded
from fastckpt._core.ipc.messages import Message
from fastckpt.errors import AgentLost, ProtocolError

MAX_SIZE = 1 << 20
"""The longest message in bytes."""
_LENGTH = struct.Struct("<I")
_KEEPER = "the process that keeps the checkpoints in memory (fastckpt-run, or without it the first local rank)"
_CREDENTIALS = struct.Struct("iII")
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
_HINTS = {kind: typing.get_type_hints(kind) for kind in get_args(Message)}
_REQUIRED = {kind: {f.name for f in fields(kind) if f.default_factory is f.default} for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """A message as JSON."""
    data = json.dumps({"message": type(message).__name__, "content": vars(message)}).encode()
    if len(data) > MAX_SIZE:
        raise ProtocolError(f"a message of {len(data)} bytes is longer than {MAX_SIZE}")
    return data


def decode(data: bytes) -> Message:
    """Read a message; raises ProtocolError for anything but a well-formed one."""
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {data[:80]!r}") from error
    if not (isinstance(whole, dict) and isinstance(whole.get("message"), str)):
        raise ProtocolError(f"not a message: {data[:80]!r}")
    kind, content = _KINDS.get(whole["message"]), whole.get("content")
    if kind is None or not isinstance(content, dict):
        raise ProtocolError(f"unknown message: {data[:80]!r}")
    if not _REQUIRED[kind] <= content.keys() <= _HINTS[kind].keys():
        raise ProtocolError(f"{kind.__name__} with fields {sorted(content)}; it has {sorted(_HINTS[kind])}")
    for name, value in content.items():
        if not _fits(value, _HINTS[kind][name]):
            raise ProtocolError(f"{kind.__name__}.{name} is {str(value)[:80]!r}; it must be a {_HINTS[kind][name]}")
    return kind(**content)


def _fits(value: Any, hint: Any) -> bool:
    if type(hint) is type:
        return type(value) is hint and not (type(value) is int and value < 0)
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(hint)[1]) for item in value.values())
    assert origin in (Union, types.UnionType), hint
    return any(_fits(value, option) for option in get_args(hint))


def pack(message: Message) -> bytes:
    """A message as it goes over the wire: its length in four bytes, then JSON."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


def bind(address: str) -> socket.socket:
    """Listen at an abstract address (``@name``): it has no file, and is gone when this process is."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_abstract(address))
    listener.listen(128)
    return listener


def peer(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as the kernel reports them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None when the other end is closed; raises ProtocolError for garbage."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_SIZE:
            raise ProtocolError(f"a message of {length} bytes is longer than {MAX_SIZE}")
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Channel:
    """A writer's end: asks one thing at a time, each with a deadline; any thread may send messages without an answer.

    Attributes:
        peer_pid: The process at the other end.
    """

    def __init__(self, address: str, timeout: float) -> None:
        """Connect to the saver at ``address``, trying for ``timeout`` seconds.

        Raises:
            AgentLost: Nobody answers there, or somebody else's process does.
        """
        self._timeout = timeout
        self._sending = threading.RLock()
        self._why_closed = ""
        self._socket = _connect(address, timeout)
        self._opened = opened(self._socket.fileno())
        self.peer_pid, uid = peer(self._socket)
        if uid != os.getuid():
            self._socket.close()
            raise AgentLost(coded(f"the process at {address} belongs to user {uid}, not to {os.getuid()}", "FC-003"))

    def ask(self, message: Message, timeout: float | None = None) -> Message:
        """Send a message and wait for its answer; raises AgentLost."""
        self.send(message)
        return self.answer(timeout)

    def send(self, message: Message) -> None:
        """Send a message; its answer, if any, is to be fetched before the next message. Raises AgentLost."""
        data = pack(message)
        with self._sending, self._lost():
            self._socket.settimeout(self._timeout)
            self._socket.sendall(data)

    def answer(self, timeout: float | None = None) -> Message:
        """Wait for the answer to the last message.

        Raises:
            AgentLost: The saver is gone, or does not answer within ``timeout`` seconds. The channel is closed then: an
                answer may still come, and is not to be taken for another.
            ProtocolError: The message that comes is no answer.
        """
        with self._lost():
            self._socket.settimeout(self._timeout if timeout is None else timeout)
            (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
            if length > MAX_SIZE:
                self.close()
                raise ProtocolError(f"an answer of {length} bytes is longer than {MAX_SIZE}")
            return decode(self._read_exactly(length))

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            self._check()
            yield
        except OSError as error:
            self.close()
            # A closed socket has no reason: whoever uses it next is to read why it was closed.
            late = isinstance(error, TimeoutError)
            self._why_closed = self._why_closed or ("did not answer in time" if late else f"is gone: {error}")
            raise AgentLost(f"{_KEEPER} {self._why_closed}") from error

    def _check(self) -> None:
        """Raise OSError if the script has closed the descriptor: another file of its may have the number by now."""
        number = self._socket.fileno()
        if number >= 0 and opened(number) != self._opened:
            self._why_closed = (
                f"is not reached any more: this script has closed descriptor {number}, the connection to it. Close all "
                "descriptors, as os.closerange does, before there is a checkpointer, or your own ones only"
            )
            raise OSError(self._why_closed)

    def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            if not chunk:
                raise ConnectionResetError(f"closed after {len(data)} of {size} bytes")
            data += chunk
        return data

    @property
    def is_read(self) -> bool:
        """True if the other end has read all that was sent, so that sending does not wait. False once it is closed."""
        left = array.array("i", [1])
        try:
            fcntl.ioctl(self._socket, termios.TIOCOUTQ, left)
        except (OSError, ValueError):
            return False
        return left[0] == 0

    def close(self) -> None:
        """Hang up."""
        number = self._socket.fileno()
        if number >= 0 and opened(number) != self._opened:
            self._socket.detach()
        self._socket.close()


def _connect(address: str, timeout: float) -> socket.socket:
    end = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)  # else it would wait without end for who accepts none
        try:
            connection.connect(_abstract(address))
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > end:
                raise AgentLost(f"nobody answers at {address}: {error}") from error
            time.sleep(0.01)


def _abstract(address: str) -> str:
    return "\0" + address.removeprefix("@")
