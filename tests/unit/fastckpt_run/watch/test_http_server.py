"""The HTTP server of an agent, asked over real sockets."""

import socket
import threading
import urllib.error
import urllib.request
from contextlib import closing

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


@pytest.mark.parametrize(
    ("text", "address"),
    [("9400", ("127.0.0.1", 9400)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:0", ("::1", 0)), ("a.b:80", ("a.b", 80))],
)
def test_an_address_is_a_port_or_a_host_and_a_port(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "65536", "-1", ":80", "host:", "host:x", "1.5", "٣"])
def test_an_address_that_is_none_is_refused_with_the_remedy(text):
    with pytest.raises(ConfigError, match=r"metrics_port is .*; give PORT or HOST:PORT"):
        parse_address(text)


def test_a_page_gets_query_and_body_and_answers(server):
    body, headers = get(server, "/echo?say=a%20b")
    assert (body, headers["X-Own"], headers["Cache-Control"]) == (b"a b", "1", "no-store")
    assert get(server, "/echo", b"posted")[0] == b"posted"


def test_pages_that_do_not_exist_and_bodies_that_are_too_large_are_refused(server):
    for path, data, status in (("/", None, 404), ("/echo", b"x" * (http_server.LARGEST_BODY + 1), 413)):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(server, path, data)
        error.value.close()
        assert error.value.code == status


def test_another_method_is_told_which_one_there_is_and_a_head_has_no_body(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(server, "/fail", b"posted")
    with refused.value as error:
        assert (error.code, error.headers["Allow"], error.read()) == (
            405,
            "GET",
            b"POST has no meaning here; use GET\n",
        )
    request = urllib.request.Request(server.url + "/echo?say=abc", method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert (answer.read(), answer.headers["Content-Length"]) == (b"", "3")


def test_a_page_that_fails_is_logged_once_and_the_others_are_served(server, caplog):
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(server, "/fail")
        error.value.close()
        assert error.value.code == 500
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


def test_an_address_that_makes_no_sense_is_refused(server):
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
        assert b" 400 " in connection.recv(64)


def test_readers_that_ask_for_nothing_are_few_and_keep_nobody_out_for_ever(server, monkeypatch):
    monkeypatch.setattr(http_server._Handler, "timeout", 0.5)
    idle = [socket.create_connection((server.host, server.port)) for _ in range(http_server.AT_ONCE + 4)]
    try:
        refused = idle[-1]
        refused.settimeout(10)
        assert refused.recv(1) == b""  # closed: too many are under way
        for connection in idle[: http_server.AT_ONCE]:
            connection.settimeout(10)
            assert connection.recv(1) == b""  # after its time
        for _ in range(100):  # the threads of these end a moment later
            try:
                assert get(server, "/echo?say=1")[0] == b"1"
                break
            except (urllib.error.URLError, ConnectionError):
                threading.Event().wait(0.05)
        else:
            pytest.fail("the server serves nobody any more")
    finally:
        for connection in idle:
            connection.close()
