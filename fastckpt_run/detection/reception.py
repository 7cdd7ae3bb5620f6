"""The reception of connections of other agents: each has to prove itself in bounded time, and few may wait for that."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable

from fastckpt._core.ipc.listener import BACKLOG, without_prefix
from fastckpt_run.detection.authenticated_link import LONGEST, AuthenticatedLink, ForgedMessage, Purpose, close

logger = logging.getLogger("fastckpt.launcher")

MOST_STRANGERS = 32
"""Connections that have not proven themselves yet, at most: the oldest is closed for another."""
HANDSHAKE = 1.0
"""Seconds in which a connection has to prove itself."""
MOST_LOGGED = 16
"""Hosts with refused messages that are logged, once each."""


def address_of(listener: socket.socket) -> str:
    """Return the address at which others reach a socket that listens, as ``host:port``."""
    host, port = listener.getsockname()[:2]
    return f"{socket.gethostname() if host in ('0.0.0.0', '::') else host}:{port}"


class Reception:
    """Listens at an address, and hands over connections from peers that know the secret.

    Args:
        secret: Of the job.
        own_id: The id of this member.
        serve: Called with each connection and its purpose; the connection is closed at the end.
        listener: A socket that listens; see `listener.listen`.

    Attributes:
        address: Address at which others reach this member, as ``host:port``.
    """

    def __init__(
        self,
        secret: bytes,
        own_id: str,
        serve: Callable[[AuthenticatedLink, Purpose], Awaitable[None]],
        listener: socket.socket,
    ) -> None:
        self._secret, self._own, self._serve = secret, own_id, serve
        self._socket = listener
        self.address = address_of(listener)
        self._strangers: deque[asyncio.StreamWriter] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused: set[str] = set()

    async def open(self) -> None:
        """Begin to accept connections."""
        self._server = await asyncio.start_server(self._accept, sock=self._socket, limit=LONGEST, backlog=BACKLOG)

    async def close(self) -> None:
        """Close all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def refuse(self, host: str, error: ForgedMessage) -> None:
        """Log once for each host that a message was refused."""
        if host not in self._refused and len(self._refused) < MOST_LOGGED:
            self._refused.add(host)
            logger.warning("refused a message from %s: %s; later refusals of that host are not logged", host, error)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._receive(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = without_prefix((writer.get_extra_info("peername") or ("?",))[0])
        try:
            link, purpose = await self._introduced(reader, writer)
            await self._serve(link, purpose)
        except ForgedMessage as error:
            self.refuse(host, error)
        except OSError:  # TimeoutError among them
            logger.debug("a connection from %s was closed", host)
        finally:
            close(writer)

    async def _introduced(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[AuthenticatedLink, Purpose]:
        if len(self._strangers) >= MOST_STRANGERS:
            close(self._strangers.popleft())
        self._strangers.append(writer)
        try:
            async with asyncio.timeout(HANDSHAKE):
                return await AuthenticatedLink.accept(reader, writer, self._secret, self._own)
        finally:
            if writer in self._strangers:
                self._strangers.remove(writer)
