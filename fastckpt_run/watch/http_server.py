"""An HTTP server for people and for tools that watch a job: pages by path, in threads that nobody waits for."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR, SO_REUSEADDR, SOL_SOCKET, AddressFamily, socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastckpt._core.version import VERSION
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt.launcher")

AT_ONCE = 16
"""Requests that are served at once; a further one takes the place of the slowest reader, if any is waited for."""
TIMEOUT = 10.0
"""Seconds for which a reader may keep silent, or take nothing of the answer."""
DEADLINE = 30.0
"""Seconds for a reader to send a request, and to take the answer: byte by byte it could keep its place for ever."""
LARGEST_BODY = 1 << 16
LOCAL = "127.0.0.1"
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


@dataclass(frozen=True)
class Request:
    """A request: the fields of its query, its body, and its headers by names in lower case."""

    query: Mapping[str, str]
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Response:
    """An answer; a text is sent as UTF-8."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Page = Callable[[Request], Response]
"""Answers a request, in a thread of its own."""


def parse_address(text: str) -> tuple[str, int]:
    """The host and the port of PORT, HOST:PORT or [HOST]:PORT; this machine alone without a host.

    Raises ConfigError if it is none.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (colon and not host):
        raise ConfigError(
            f"metrics_port is {text!r}; give PORT or HOST:PORT, with a port from 0 to 65535, such as 9400, or "
            "0.0.0.0:9400 to be reached from other machines (--fast-metrics-port, FASTCKPT_METRICS_PORT)"
        )
    return host or LOCAL, int(port)


class HttpServer:
    """Serves ``pages`` at an address until `close`.

    Args:
        address: As `parse_address`; with port 0 the kernel chooses one.
        pages: Pages by method and path, such as ("GET", "/metrics"); may grow later.

    Attributes:
        host: Address on which it listens; 127.0.0.1 is reached from this machine alone.
        port: The port there.

    Raises:
        ConfigError: The address is none, or cannot be had.
    """

    def __init__(self, address: str, pages: Mapping[tuple[str, str], Page]) -> None:
        self.host, port = parse_address(address)
        try:
            self._server = _Server((self.host, port), pages)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served at {self.host}:{port}: {error.strerror or error}; give another port, or 0 "
                "for any that is free (--fast-metrics-port, FASTCKPT_METRICS_PORT)"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="fastckpt-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """URL for a browser on this machine."""
        host = {"0.0.0.0": LOCAL, "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        """Serve nobody any more; answers that are on their way are not waited for."""
        self._server.shutdown()
        self._server.server_close()


@dataclass
class _Reader:
    """A connection: since when it is served, and whether its other end is waited for, not a page that is made."""

    since: float
    is_awaited: bool = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], pages: Mapping[tuple[str, str], Page]) -> None:
        self.pages, self.failed = pages, set[Page]()
        self.address_family: AddressFamily = AF_INET6 if ":" in address[0] else AF_INET
        self.readers: dict[socket, _Reader] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without looking up this host's name, which may take long; also where a launch before has just ended."""
        self.socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # connections to that one stay in the kernel for a minute
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a request in a thread; if too many are under way, in place of the reader that has taken longest."""
        with self._lock:
            awaited = [each for each, reader in self.readers.items() if reader.is_awaited]
            is_full = len(self.readers) >= AT_ONCE
            if is_full and awaited:
                self._drop(awaited[0])  # the oldest
            elif is_full:
                self.shutdown_request(request)
                return
            self.readers[request] = _Reader(time.monotonic())
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started: the next one may be
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Drop readers past their deadline; called twice a second."""
        with self._lock:
            for request, reader in [*self.readers.items()]:
                if reader.is_awaited and time.monotonic() > reader.since + DEADLINE:
                    self._drop(request)

    def _drop(self, request: socket) -> None:
        """End a connection: its thread finds that, and ends."""
        del self.readers[request]
        with suppress(OSError):  # it has just ended
            request.shutdown(SHUT_RDWR)

    def _forget(self, request: socket) -> None:
        with self._lock:
            self.readers.pop(request, None)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Ignore readers that have gone."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = TIMEOUT
    server_version, sys_version = f"fastckpt/{VERSION}", ""

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Answer a POST."""
        self._answer("POST")

    def do_HEAD(self) -> None:
        """Answer a HEAD as a GET, without the body."""
        self._answer("GET")

    def _answer(self, method: str) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        page = self.server.pages.get((method, address.path))
        others = [name for name, path in self.server.pages if path == address.path]
        length = self.headers.get("Content-Length") or "0"
        if page is None and others:
            text = f"{method} has no meaning here; use {' or '.join(others)}\n"
            response = Response(
                text.encode(), "text/plain", HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": ", ".join(others)}
            )
        elif page is None:
            response = Response(b"there is no such page\n", status=HTTPStatus.NOT_FOUND)
        elif not (length.isascii() and length.isdigit() and len(length) < 10) or int(length) > LARGEST_BODY:
            response = Response(b"the body is too large\n", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            query = {name: values[-1] for name, values in parse_qs(address.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            response = self._made(page, Request(query, self.rfile.read(int(length)), headers))
        self.send_response(response.status)
        for name, value in {**_HEADERS, **response.headers, "Content-Type": response.kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def _made(self, page: Page, request: Request) -> Response:
        reader = self.server.readers.get(self.connection, _Reader(0.0))  # one that was just dropped
        try:
            reader.is_awaited = False
            return page(request)
        # A page that fails is a fault of ours, for the log; the job and the other pages go on.
        except Exception:
            if page not in self.server.failed:
                logger.warning("a page cannot be made: %s", self.path, exc_info=True)
            self.server.failed.add(page)
            return Response(
                b"this page cannot be made: see the log of the job\n", status=HTTPStatus.INTERNAL_SERVER_ERROR
            )
        finally:
            reader.since, reader.is_awaited = time.monotonic(), True  # a page may take long: it has yet to be sent

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: whoever scrapes comes every few seconds."""
