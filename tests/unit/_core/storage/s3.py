"""A real S3 server on a loopback port, and a proxy before it through which requests fail as a test says."""

import contextlib
import http.client
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

import fsspec.asyn
import pytest

from tests.conftest import MARK

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>as the test says</Message></Error>"
CODES = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied", 501: "NotImplemented"}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The server's host and port; it lives as long as the tests of this process."""
    fsspec.asyn.get_loop()  # lives as long as this process, too
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name not in (MARK, "TMPDIR")},
    )  # fmt: skip
    assert server.stderr is not None
    try:
        found = next(match[1] for line in server.stderr if (match := re.search(r"http://(127.0.0.1:\d+)", line)))
        reader = threading.Thread(target=server.stderr.read, daemon=True)
        reader.start()  # else the server would wait for somebody to read its log
        yield found
    finally:
        server.terminate()
        server.wait()
        server.stderr.close()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator["S3"]:
    """An empty bucket behind a proxy; credentials and address are in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    _ask(s3_server, "POST", "/moto-api/reset")
    _ask(s3_server, "PUT", f"/{BUCKET}")
    with Proxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        service = S3(proxy)
        yield service
        proxy.faults.clear()
        service.close()


def _ask(server: str, verb: str, path: str) -> None:
    connection = http.client.HTTPConnection(server, timeout=60)
    try:
        connection.request(verb, path)
        assert connection.getresponse().status == 200
    finally:
        connection.close()


@dataclass
class Fault:
    """A failure of requests whose verb and path match.

    Attributes:
        how: "drop" before the request is passed on, "lose" its answer, a status to answer with, "cut" the answer's
            body in half, "flip" a byte of it, "stall" for 0.5 s, "hang" until the test ends.
        after: Requests that match and pass first.
        times: How many requests fail; with ``every``, each request of that ordinal does.
    """

    how: str | int
    verb: str = ".*"
    path: str = ".*"
    after: int = 0
    times: int = 1
    every: int = 0
    injected: int = 0
    seen: int = 0

    def applies(self, verb: str, path: str) -> bool:
        if not (re.fullmatch(self.verb, verb) and re.search(self.path, path)):
            return False
        self.seen += 1
        applies = self.seen % self.every == 0 if self.every else self.after < self.seen <= self.after + self.times
        self.injected += applies
        return applies


class Proxy:
    """Passes requests on to a server, except those that a fault applies to."""

    def __init__(self, server: str) -> None:
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def do_any(self) -> None:
                proxy._handle(self, server)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def inject(self, *faults: Fault) -> Fault:
        self.faults += faults
        return faults[0]

    def _handle(self, handler: BaseHTTPRequestHandler, server: str) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        with self._lock:
            self.requests.append((handler.command, handler.path))
            fault = next((f for f in self.faults if f.applies(handler.command, handler.path)), None)
        how = fault.how if fault else ""
        if how == "hang":
            self._over.wait()
        if how in ("drop", "hang"):
            handler.close_connection = True
            return
        if isinstance(how, int):
            self._answer(handler, how, [("Content-Type", "application/xml")], ERROR.format(CODES[how]).encode())
            return
        if how == "stall":
            time.sleep(0.5)
        upstream = http.client.HTTPConnection(server, timeout=60)
        try:
            upstream.request(handler.command, handler.path, body, dict(handler.headers.items()))
            answer = upstream.getresponse()
            status, headers, data = answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()
        if how == "lose":
            handler.close_connection = True
            return
        if how == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
        self._answer(handler, status, headers, data, half=how == "cut")

    def _answer(
        self, handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], data: bytes,
        half: bool = False,
    ) -> None:  # fmt: skip
        handler.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                handler.send_header(name, value)
        handler.send_header("Content-Length", length if handler.command == "HEAD" else str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2] if half else data)
        handler.close_connection = half

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()  # waits for the threads that serve
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End the connections that clients keep for later."""
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)


class S3:
    """A server as tests see it, with faults injected into requests to it."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self._fs: Any = None

    @property
    def fs(self) -> Any:
        """A client of the test's own."""
        if self._fs is None:
            self._fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        return self._fs

    def inject(self, *faults: Fault) -> Fault:
        return self.proxy.inject(*faults)

    def objects(self) -> dict[str, int]:
        """All objects and their sizes."""
        return {key: info["size"] for key, info in self.fs.find(BUCKET, detail=True).items()}

    def uploads(self) -> list[str]:
        """The keys of uploads under way."""
        return [upload["Key"] for upload in self.fs.list_multipart_uploads(BUCKET)]

    def close(self) -> None:
        if self._fs is not None and self._fs._s3 is not None:
            fsspec.asyn.sync(self._fs.loop, self._fs._s3.close)
