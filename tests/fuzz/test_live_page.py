"""The live page of a job among requests that are none: each is answered, refused or hung up on; others are served."""

import contextlib
import gc
import http.client
import json
import random
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from fastckpt_run.watch.http_server import HttpServer
from fastckpt_run.watch.live_page import TOKEN
from tests.fuzz.test_agents import AT_ONCE, GROWTH, NUMBERS
from tests.unit.fastckpt_run.watch.test_live_page import LINES, Served

PAGES = ("/", "/live", "/status.json", "/flush", "/stop", "/nothing", "/live?since=1&x=%zz", "*", "http://[")
HEADERS = (
    b"Host: localhost", b"Host: [::1", b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: \xb2",
    b"Content-Length: 99999999999999999999", b"Content-Length: " + b"9" * 5000, b": ", b" continued",
    b"Content-Length: 1\r\nContent-Length: 9", b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"x" * 200,
    b"Connection: keep-alive", b"X: " + b"x" * 70_000, b"\xff\xfe: \0", TOKEN.encode() + b": \xff\xff",
    TOKEN.encode() + b": " + b"a" * 60_000, b"\r\n".join(b"Y%d: y" % number for number in range(150)),
)  # fmt: skip


def a_request(chance: random.Random) -> bytes:
    """A request of a browser, with headers that may be odd."""
    method, version = (
        chance.choice(("GET", "POST", "HEAD", "PUT", "")),
        chance.choice(("1.1", "1.0", "0.9", "9.9", "x")),
    )
    lines = [f"{method} {chance.choice(PAGES)} HTTP/{version}".encode(), *chance.sample(HEADERS, chance.randrange(4))]
    return b"\r\n".join([*lines, b"", b"hello"[: chance.randrange(6)]])


def state_of(server: HttpServer) -> str:
    """The state of the job, as the page shows it to who asks again where too many are asking."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(server.url + "/status.json", timeout=30) as answer:
                return str(json.loads(answer.read())["job"]["state"])
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
    raise AssertionError("the page serves nobody")


@NUMBERS
def test_the_live_page_survives_what_is_no_request(count: int, caplog: pytest.LogCaptureFixture) -> None:
    failed: list[object] = []
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading, "excepthook", failed.append)
        server, before = Served(1, stack, LINES).servers[0], psutil.Process().memory_info().rss

        def browse(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(count // AT_ONCE):
                address = ("127.0.0.1", server.port)
                with contextlib.suppress(OSError), socket.create_connection(address, 0.2) as plain:
                    plain.sendall(a_request(chance))
                    if chance.random() < 0.7:
                        plain.shutdown(socket.SHUT_WR)
                    while plain.recv(1 << 16):
                        pass

        with ThreadPoolExecutor(AT_ONCE) as pool:
            asked = [pool.submit(browse, seed) for seed in range(AT_ONCE)]
            assert state_of(server) == "trains"
            for one in asked:
                one.result()
        assert state_of(server) == "trains"
        gc.collect()
        assert psutil.Process().memory_info().rss - before < GROWTH
    assert failed == [] and "a page cannot be made" not in caplog.text
