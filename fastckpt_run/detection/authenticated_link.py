"""Connections between agents: both ends prove that they know the job's secret, and sign each message."""

import asyncio
import contextlib
import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Any, Self

from fastckpt.errors import ProtocolError

LONGEST = 4096
"""Bytes of a message, at most."""
_NONCE = 16


class ForgedMessage(ProtocolError):
    """A message is not signed with the job's secret, was sent before, or is none."""


@dataclass(frozen=True)
class Purpose:
    """Purpose of a connection, given in its first message.

    Attributes:
        kind: Such as "watch".
        sender: The id of the member that connects.
        receiver: The id of the member that it means to reach.
    """

    kind: str
    sender: str
    receiver: str


class AuthenticatedLink:
    """One end of a connection; the other end has proven that it knows the secret.

    Each end draws a nonce, so that nothing of another connection can be sent again in this one; messages are counted,
    so that nothing of this one can.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, role: str) -> None:
        self._reader, self._writer, self._key, self._role = reader, writer, key, role
        self._peer_role = "initiator" if role == "responder" else "responder"
        self._sent = self._received = 0

    @classmethod
    async def open(cls, address: str, secret: bytes, purpose: Purpose) -> Self:
        """Connect to ``host:port``.

        Raises:
            OSError: Nobody listens there, or the connection was closed.
            ForgedMessage: The other end does not know the secret, or is not the member that was meant.
        """
        return await cls.initiate(*await connection(address), secret, purpose)

    @classmethod
    async def initiate(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, purpose: Purpose
    ) -> Self:
        """Prove this end's knowledge over a connection that it has made; raises as `open`, and closes it then."""
        try:
            theirs = _text(await _line(reader), "nonce")
            mine = secrets.token_hex(_NONCE)
            parts = (mine, theirs, purpose.kind, purpose.sender, purpose.receiver)
            hello = {"nonce": mine, "kind": purpose.kind, "from": purpose.sender, "to": purpose.receiver}
            await _write(writer, hello | {"mac": signature(secret, "initiator", *parts)})
            _check(_text(await _line(reader), "mac"), signature(secret, "responder", *parts))
            return cls(reader, writer, bytes.fromhex(signature(secret, "key", *parts)), "initiator")
        except BaseException:
            close(writer)
            raise

    @classmethod
    async def accept(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, own_id: str
    ) -> tuple[Self, Purpose]:
        """Let the end that has connected prove itself; raises as `open`."""
        mine = secrets.token_hex(_NONCE)
        await _write(writer, {"nonce": mine})
        hello = await _line(reader)
        theirs, kind, sender, receiver = (_text(hello, name) for name in ("nonce", "kind", "from", "to"))
        parts = (theirs, mine, kind, sender, receiver)
        _check(_text(hello, "mac"), signature(secret, "initiator", *parts))
        if receiver != own_id:
            raise ForgedMessage(f"{sender} asks for {receiver}, and this is {own_id}")
        await _write(writer, {"mac": signature(secret, "responder", *parts)})
        link = cls(reader, writer, bytes.fromhex(signature(secret, "key", *parts)), "responder")
        return link, Purpose(kind, sender, receiver)

    async def send(self, body: dict[str, Any]) -> None:
        """Send a message; raises OSError if the connection was closed."""
        text = json.dumps(body)
        number, self._sent = self._sent, self._sent + 1
        mac = signature(self._key, self._role, str(number), text)
        await _write(self._writer, {"number": number, "body": text, "mac": mac})

    async def receive(self) -> dict[str, Any]:
        """The next message; raises OSError at the end of the connection, and ForgedMessage for one of a stranger."""
        message = await _line(self._reader)
        text, number = _text(message, "body"), self._received
        _check(_text(message, "mac"), signature(self._key, self._peer_role, str(number), text))
        self._received += 1
        return _object(text.encode())

    def close(self) -> None:
        """Close the connection."""
        close(self._writer)


async def connection(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TCP connection to ``host:port``."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port), limit=LONGEST)


def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection; the error with which it ended, if any, is not logged by asyncio besides."""
    writer.close()
    # It is stored in a future, too, and if the garbage collector comes upon that first, it was never retrieved.
    closed = asyncio.ensure_future(writer.wait_closed())
    closed.add_done_callback(lambda _: closed.cancelled() or closed.exception())


def signature(key: bytes, *parts: str) -> str:
    """HMAC-SHA256 of texts, in hexadecimal; JSON keeps apart where one ends."""
    return hmac.new(key, json.dumps(parts).encode(), "sha256").hexdigest()


def _check(given: str, expected: str) -> None:
    if not hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode()):
        raise ForgedMessage("a message is not signed with the job's secret, or was sent before")


async def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _line(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        return _object(await reader.readuntil(b"\n"))
    except asyncio.LimitOverrunError as error:
        raise ForgedMessage(f"a message is longer than {LONGEST} bytes") from error
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ForgedMessage("a message was cut off") from error
        raise ConnectionResetError("the connection was closed") from error


def _object(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    raise ForgedMessage("a message is no JSON object")


def _text(message: dict[str, Any], name: str) -> str:
    found = message.get(name)
    if not isinstance(found, str):
        raise ForgedMessage(f"a message has no {name}")
    return found
