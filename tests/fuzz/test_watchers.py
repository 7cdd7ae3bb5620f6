"""The watch over other nodes and the live page among strangers and liars: who is right is heard, and none stays."""

import asyncio
import contextlib
import gc
import http.client
import json
import logging
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psutil
import pytest

from fastckpt.errors import FastckptError
from fastckpt_run.detection.authenticated_link import AuthenticatedLink, Purpose
from fastckpt_run.detection.probes import ASK, MEMBER, PROBE
from fastckpt_run.watch.http_server import HttpServer
from fastckpt_run.watch.live_page import TOKEN
from tests.fuzz.relays import Relay, untrue
from tests.fuzz.test_agents import AT_ONCE, GROWTH, NUMBERS, OWN, SHORT
from tests.unit.fastckpt_run.detection.test_neighbor_watch import SECRET, Member, begin
from tests.unit.fastckpt_run.watch.test_live_page import LINES, Served

NAMES = [f"node {number}" for number in range(3)]


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Three that watch each other, and take nobody for lost while this process has no core."""
    made = [Member(name, 60.0) for name in NAMES]
    begin(made)
    yield made
    for each in made:
        each.stop()


class LyingLink(AuthenticatedLink):
    """An end that knows the secret, and whose messages are not true."""

    chance = random.Random()

    async def send(self, body: dict[str, Any]) -> None:
        await super().send(untrue(body, self.chance))


async def say(address: str, count: int, seed: int, kind: type[AuthenticatedLink]) -> None:
    chance, sent = random.Random(seed), 0
    while sent < count:
        purpose = Purpose(chance.choice(("watch", PROBE, ASK, "weather")), "node 1", "node 0")
        with contextlib.suppress(OSError, FastckptError, *OWN):
            async with asyncio.timeout(SHORT):
                link = await kind.open(address, SECRET, purpose)
                try:
                    sent += 1
                    for _ in range(2):
                        sent += 1
                        await link.send({"kind": "beat"} if purpose.kind == "watch" else {MEMBER: "node 2"})
                        await link.receive()
                finally:
                    link.close()
        sent += 1  # the greeting


def talk(address: str, count: int, kind: type[AuthenticatedLink]) -> None:
    async def all_at_once() -> None:
        await asyncio.gather(*(say(address, count // AT_ONCE, seed, kind) for seed in range(AT_ONCE)))

    asyncio.run(all_at_once())


@NUMBERS
@pytest.mark.parametrize("kind", [AuthenticatedLink, LyingLink])
def test_a_member_survives_strangers_and_liars_and_nobody_is_taken_for_lost(
    members: list[Member], kind: type[AuthenticatedLink], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "asyncio")
    first, before = members[0], psutil.Process().memory_info().rss
    LyingLink.chance = random.Random(6)
    if kind is LyingLink:
        talk(first.address, count, kind)
    else:
        with closing(Relay(first.address, 7)) as relay:
            talk(relay.address, count, kind)
            print(f"{relay.passed} messages", flush=True)
            assert relay.passed >= count
    assert members[1].answers("node 0") and first.answers("node 1") and members[2].answers("node 0")
    assert [each.lost for each in members] == [[], [], []]
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    end = time.monotonic() + 30
    while len(first._reception._tasks) > len(members) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(first._reception._tasks) <= len(members) and not first._reception._strangers
    gc.collect()
    assert psutil.Process().memory_info().rss - before < GROWTH


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


def browse(address: str, count: int, seed: int) -> None:
    chance, (host, _, port) = random.Random(seed), address.rpartition(":")
    for _ in range(count):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), SHORT) as plain:
            plain.sendall(a_request(chance))
            if chance.random() < 0.7:
                plain.shutdown(socket.SHUT_WR)
            while plain.recv(1 << 16):
                pass


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
        served = Served(1, stack, LINES)
        server, before = served.servers[0], psutil.Process().memory_info().rss
        assert state_of(server) == "trains"
        with closing(Relay(f"127.0.0.1:{server.port}", 8)) as relay, ThreadPoolExecutor(AT_ONCE) as pool:
            asked = [pool.submit(browse, relay.address, count // AT_ONCE, seed) for seed in range(AT_ONCE)]
            assert state_of(server) == "trains"
            for one in asked:
                one.result()
            print(f"{relay.passed} messages", flush=True)
            assert relay.passed >= count
        assert state_of(server) == "trains"
        gc.collect()
        assert psutil.Process().memory_info().rss - before < GROWTH
    assert failed == [] and "a page cannot be made" not in caplog.text
