"""Serves the agents of other nodes that know the job's secret: files in this node's memory, and messages."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.ipc.listener import listen, without_prefix
from fastckpt._core.ipc.sealed import SealedConnection, reading
from fastckpt.errors import FastckptError, ProtocolError

logger = logging.getLogger("fastckpt")

STRANGERS = 64
"""Connections at once of processes that have yet to prove that they know the secret; further ones wait."""
LAST = 5.0
"""Seconds that the end of the agent waits for a thread that serves another."""
PAUSE = 0.1
"""Seconds after which a connection is accepted again that was not."""
TIMEOUT = 120.0
"""Seconds of silence after which a connection is given up."""

Handler = Callable[[SealedConnection, dict[str, Any]], dict[str, Any]]
"""Carries out a request, and returns the answer."""


class PeerServer:
    """Listens on all interfaces of this host, at a port that the kernel chooses.

    Args:
        handlers: Handlers by the name of the request.

    Attributes:
        port: Port on which it listens.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._secret = b""
        self._listener = listen()
        self.port: int = self._listener.getsockname()[1]
        self._turns = threading.BoundedSemaphore(STRANGERS)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._refused: set[str] = set()
        self._threads: set[threading.Thread] = set()
        self._ended = threading.Event()
        self._start(self._serve)

    def set_secret(self, secret: bytes) -> None:
        """Serve peers that prove to know this; before it is set, no peer is served."""
        self._secret = secret

    def close(self) -> None:
        """Serve nobody any more."""
        self._ended.set()
        # Without a shutdown, a thread that waits in accept would keep the socket open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connected in self._open:
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
        for thread in [*self._threads]:
            thread.join(LAST)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name="fastckpt-peers", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._turns.acquire()
            try:
                self._accept()
            # Such as no descriptor, or no thread: later peers are served.
            except (OSError, RuntimeError) as error:
                self._turns.release()
                if not self._ended.wait(PAUSE):
                    logger.debug("an agent was not served: %s", error)

    def _accept(self) -> None:
        connected, (host, *_) = self._listener.accept()
        try:
            self._start(self._talk, connected, without_prefix(host))
        except RuntimeError:
            connected.close()
            raise

    def _talk(self, connected: socket.socket, host: str) -> None:
        with self._lock:
            self._open.add(connected)
        try:
            with self._greeting():
                connection = SealedConnection.accept(connected, self._secret, TIMEOUT)
            while (request := connection.receive()) is not None:
                connection.send(self._answer(connection, request))
        except (FastckptError, ValueError) as error:
            metrics.counts["refused_connections"] += 1
            if host not in self._refused:  # once: else a stranger could fill up the log
                logger.warning("refused an agent at %s: %s; later refusals of that host are not logged", host, error)
            self._refused.add(host)
        except OSError:
            pass  # it has gone
        finally:
            with self._lock:
                self._open.discard(connected)
            connected.close()

    @contextlib.contextmanager
    def _greeting(self) -> Iterator[None]:
        try:
            if not self._secret:
                raise ProtocolError("this agent is in no round yet")
            yield
        finally:
            self._turns.release()

    def _answer(self, connection: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        handler = self._handlers.get(str(request.get("ask")))
        if handler is None:
            return {"refused": f"nobody here answers {request.get('ask')!r}"}
        try:
            with reading(f"the request {request['ask']!r}"):
                return handler(connection, request)
        except FastckptError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
