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


def echo(request: Request) -> Response:
    return Response(request.query.get("say", "").encode() + request.body, headers={"X-Own": "1"})


def fail(request: Request) -> Response:
    raise ValueError("a fault of a page")


@pytest.fixture
def server():
    with closing(HttpServer("0", {("GET", "/echo"): echo, ("POST", "/echo"): echo, ("GET", "/fail"): fail})) as server:
        yield server


def get(server, path, data=None):
    with urllib.request.urlopen(server.url + path, data, timeout=10) as answer:
        return answer.read(), answer.headers


def test_an_address_is_a_port_or_a_host_and_a_port():
    for text, address in {"9400": ("127.0.0.1", 9400), "[::1]:0": ("::1", 0), "a.b:80": ("a.b", 80)}.items():
        assert parse_address(text) == address
    for text in ("", "x", "65536", "-1", ":80", "host:", "host:x", "1.5", "٣"):
        with pytest.raises(ConfigError, match=r"metrics_port is .*; give PORT or HOST:PORT"):
            parse_address(text)


@contextmanager
def refused(status):
    with pytest.raises(urllib.error.HTTPError) as error:
        yield error
    error.value.close()
    assert error.value.code == status


def test_pages_that_do_not_exist_and_bodies_that_are_too_large_are_refused(server):
    for path, data, status in (("/", None, 404), ("/echo", b"x" * (http_server.LARGEST_BODY + 1), 413)):
        with refused(status):
            get(server, path, data)


def test_another_method_is_told_which_one_there_is_and_a_head_has_no_body(server):
    with refused(405) as error:
        get(server, "/fail", b"posted")
    assert error.value.headers["Allow"] == "GET"
    request = urllib.request.Request(server.url + "/echo?say=abc", method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert (answer.read(), answer.headers["Content-Length"]) == (b"", "3")


def test_a_page_that_fails_is_logged_once_and_the_others_are_served(server, caplog):
    for _ in range(2):
        with refused(500):
            get(server, "/fail")
    assert caplog.text.count("ValueError: a fault of a page") == 1
    assert get(server, "/echo?say=1")[0] == b"1"


def test_a_port_that_is_taken_is_refused_by_name(server):
    with pytest.raises(ConfigError, match=rf"metrics cannot be served at 127.0.0.1:{server.port}: .*give another port"):
        HttpServer(str(server.port), {})


def test_threads_that_cannot_be_started_keep_nobody_out_once_they_can(server, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", refuse)
        for _ in range(http_server.AT_ONCE):
            with socket.create_connection((server.host, server.port), timeout=10) as connection:
                assert connection.recv(1) == b""
    assert get(server, "/echo?say=1")[0] == b"1"


def test_a_request_that_makes_no_sense_is_refused(server):
    requests = {b"GET http://[ HTTP/1.0\r\n\r\n": b" 400 "}
    for length in ("\u00b2", "9" * 5000, "-1", "x"):
        requests[f"GET /echo HTTP/1.0\r\nContent-Length: {length}\r\n\r\n".encode("latin-1")] = b" 413 "
    for request, status in requests.items():
        with socket.create_connection((server.host, server.port), timeout=10) as connection:
            connection.sendall(request)
            assert status in connection.recv(64)


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


def test_readers_that_never_end_their_requests_keep_nobody_out(server):
    with slow_readers(server, b"GET /echo?say=never HTTP/1.0\r\nX: ") as slow:
        for _ in range(2 * http_server.AT_ONCE):
            assert get(server, "/echo?say=1")[0] == b"1"
        assert slow[0].recv(1) == b""  # the slowest has made room


def test_readers_that_never_take_their_answers_keep_nobody_out(server):
    server._server.pages["GET", "/large"] = lambda request: Response(bytes(1 << 24))
    with slow_readers(server, b"GET /large HTTP/1.0\r\n\r\n") as slow:
        assert [connection.recv(4) for connection in slow] == [b"HTTP"] * len(slow)
        for _ in range(2 * http_server.AT_ONCE):
            assert get(server, "/echo?say=1")[0] == b"1"


def test_a_reader_that_sends_byte_by_byte_is_closed_after_its_time(server, monkeypatch):
    monkeypatch.setattr(http_server, "DEADLINE", 0.5)
    with slow_readers(server, b"GET /echo?say=") as (connection, *_), pytest.raises(ConnectionError):
        for _ in range(10_000):
            connection.sendall(b"x")  # never silent for long
            threading.Event().wait(0.01)


def test_a_page_that_is_being_made_is_not_given_up_for_a_newcomer(server):
    goes_on = threading.Event()
    server._server.pages["GET", "/slow"] = lambda request: Response(b"made" if goes_on.wait(60) else b"")
    with slow_readers(server, b"GET /slow HTTP/1.0\r\n\r\n") as readers:
        while sum(not each.is_awaited for each in [*server._server.readers.values()]) < http_server.AT_ONCE:
            threading.Event().wait(0.01)
        with socket.create_connection((server.host, server.port), timeout=10) as refused:
            assert refused.recv(1) == b""
        goes_on.set()
        for reader in readers:
            with reader.makefile("rb") as answer:
                assert answer.read().endswith(b"made")
