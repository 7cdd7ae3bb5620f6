"""The HTTP server of an agent, asked over real sockets."""

import socket
import threading
import urllib.error
import urllib.request
from contextlib import closing, contextmanager

import pytest

from fastckpt.errors import ConfigError
from fastckpt_run.watch import http_server
from fastckpt_run.watch.http_server import HttpServer, Request, Response, parse_address
from tests.support.waits import until


def echo(request: Request) -> Response:
    return Response(request.query.get("say", "").encode() + request.body)


def fail(request: Request) -> Response:
    raise ValueError("a fault of a page")


@pytest.fixture(scope="module")
def server():
    with closing(HttpServer("0", {("GET", "/echo"): echo, ("POST", "/echo"): echo, ("GET", "/fail"): fail})) as server:
        yield server


def get(server, path, data=None, **options):
    try:
        request = urllib.request.Request(server.url + path, data, **options)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers


def test_an_address_is_a_port_or_a_host_and_a_port():
    for text, address in {"9400": ("127.0.0.1", 9400), "[::1]:0": ("::1", 0), "a.b:80": ("a.b", 80)}.items():
        assert parse_address(text) == address
    for text in ("", "x", "65536", "-1", ":80", "host:", "host:x", "1.5", "٣"):
        with pytest.raises(ConfigError, match=r"metrics_port is .*; give PORT or HOST:PORT"):
            parse_address(text)


def test_requests_are_answered_or_refused_by_their_code_and_a_page_that_fails_is_logged_once(server, caplog):
    assert get(server, "/")[0] == 404
    assert get(server, "/echo?say=1", b"x" * http_server.LARGEST_BODY)[0] == b"1" + b"x" * http_server.LARGEST_BODY
    assert get(server, "/echo", b"x" * (http_server.LARGEST_BODY + 1))[0] == 413
    code, headers = get(server, "/fail", b"posted")
    assert (code, headers["Allow"]) == (405, "GET")
    body, headers = get(server, "/echo?say=abc", method="HEAD")
    assert (body, headers["Content-Length"]) == (b"", "3")
    assert [get(server, "/fail")[0] for _ in range(2)] == [500, 500]
    assert caplog.text.count("ValueError: a fault of a page") == 1
    for request, status in (
        (b"GET http://[ HTTP/1.0", b" 400 "),
        (b"GET /echo HTTP/1.0\r\nContent-Length: x", b" 413 "),
    ):
        with socket.create_connection((server.host, server.port), timeout=10) as connection:
            connection.sendall(request + b"\r\n\r\n")
            assert status in connection.recv(64)
    with pytest.raises(ConfigError, match=rf"metrics cannot be served at 127.0.0.1:{server.port}: .*give another port"):
        HttpServer(str(server.port), {})


def test_readers_that_never_end_or_take_anything_and_threads_that_cannot_be_started_keep_nobody_out(
    server, monkeypatch
):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", refuse)
        for _ in range(http_server.AT_ONCE):
            with socket.create_connection((server.host, server.port), timeout=10) as connection:
                assert connection.recv(1) == b""
    assert get(server, "/echo?say=1")[0] == b"1"

    server._server.pages["GET", "/large"] = lambda request: Response(bytes(1 << 24))
    for sends in (b"GET /echo?say=never HTTP/1.0\r\nX: ", b"GET /large HTTP/1.0\r\n\r\n"):
        with slow_readers(server, sends) as slow:
            if b"large" in sends:
                assert [connection.recv(4) for connection in slow] == [b"HTTP"] * len(slow)
            for _ in range(http_server.AT_ONCE + 1):
                assert get(server, "/echo?say=1")[0] == b"1"
            if b"never" in sends:
                assert slow[0].recv(1) == b""  # the slowest has made room

    monkeypatch.setattr(http_server, "DEADLINE", 0.5)
    with slow_readers(server, b"GET /echo?say=") as (connection, *_), pytest.raises(ConnectionError):
        for _ in range(10_000):
            connection.sendall(b"x")  # never silent for long
            threading.Event().wait(0.01)


@contextmanager
def slow_readers(server: HttpServer, sends: bytes):
    address = server.host, server.port
    connections = [socket.create_connection(address, timeout=10) for _ in range(http_server.AT_ONCE)]
    try:
        for connection in connections:
            connection.sendall(sends)
        yield connections
    finally:
        for connection in connections:
            connection.close()


def test_a_page_that_is_being_made_is_not_given_up_for_a_newcomer(server):
    goes_on = threading.Event()
    server._server.pages["GET", "/slow"] = lambda request: Response(b"made" if goes_on.wait(60) else b"")
    with slow_readers(server, b"GET /slow HTTP/1.0\r\n\r\n") as readers:
        made = server._server.readers
        until(lambda: sum(not each.is_awaited for each in [*made.values()]) == http_server.AT_ONCE)
        with socket.create_connection((server.host, server.port), timeout=10) as refused:
            assert refused.recv(1) == b""
        goes_on.set()
        for reader in readers:
            with reader.makefile("rb") as answer:
                assert answer.read().endswith(b"made")
