"""The watch over other nodes, with members that are processes, or several in one."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from fastckpt._core.config import Settings
from fastckpt._core.ipc.listener import listen
from fastckpt.errors import ConfigError
from fastckpt_run.detection import apart_members, reception
from fastckpt_run.detection.authenticated_link import LONGEST, AuthenticatedLink, Purpose, connection, signature
from fastckpt_run.detection.neighbor_watch import APART, BEAT, ISOLATED, TOGETHER, WATCH, NeighborWatch
from fastckpt_run.detection.probes import State, state_of
from tests.support.waits import DEADLINE, until

SECRET = b"the secret of this job"
LOOPBACK = "127.0.0.1"


class Member(NeighborWatch):
    """A member of a job, which notes the losses that it learns of, and when."""

    def __init__(self, name: str, timeout: float = 2.0) -> None:
        self.lost: list[tuple[list[str], str]] = []
        super().__init__(SECRET, name, self._note, timeout, listen(LOOPBACK))

    def _note(self, members: Sequence[str], reason: str) -> None:
        self.lost.append(([*members], reason))


@pytest.fixture
def members() -> Iterator[Callable[[int], list[Member]]]:
    """Makes members in this process."""
    made: list[Member] = []

    def make(count: int) -> list[Member]:
        made.extend(Member(f"node {number}") for number in range(count))
        return made

    yield make
    for each in made:
        each.stop()


def begin(members: Sequence[Member]) -> None:
    ring = [(each._own, each.address) for each in members]
    for each in members:
        each.watch(ring)
    until(lambda: all(len(each._links) == 2 * min(3, len(members) - 1) for each in members))


@contextmanager
def hosts_without_an_answer(count: int) -> Iterator[list[str]]:
    """Addresses at which the kernel answers no connection, as if there was no host: their queues are full."""
    with ExitStack() as sockets:
        addresses = []
        for _ in range(count):
            server = sockets.enter_context(socket.socket())
            server.bind((LOOPBACK, 0))
            server.listen(0)
            for _ in range(4):
                waiting = sockets.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(server.getsockname())
            addresses.append(f"{LOOPBACK}:{server.getsockname()[1]}")
        yield addresses


def test_a_member_that_reaches_no_neighbour_takes_itself_for_isolated(members):
    (one,) = members(1)
    with hosts_without_an_answer(4) as addresses:
        others = {f"node {number}": address for number, address in enumerate(addresses, start=1)}
        one._reached |= others.keys()
        one.watch([(one._own, one.address), *others.items()])
        until(lambda: one.lost)
        time.sleep(0.7)
    ((lost, reason),) = one.lost
    assert reason == ISOLATED and {*lost} <= others.keys() and len(lost) > 2


def test_a_host_without_an_answer_is_lost_but_not_if_it_was_never_reached(members, caplog):
    """A firewall may be between them, which the workers' connections pass."""
    several = members(3)
    with hosts_without_an_answer(2) as (lost, never):
        for each in several:
            each._reached.add("node 3")
            ring = [(each._own, each.address) for each in several]
            each.watch([*ring, ("node 3", lost), ("node 4", never)])
        until(lambda: all(each.lost for each in several) and caplog.text.count("it cannot be watched") >= 2)
        time.sleep(1.5)
    for each in several:
        ((lost, reason),) = each.lost
        assert lost == ["node 3"] and State.UNREACHABLE in reason


class Relay:
    """A link to a member on which packets are lost: all of those with more bytes than it lets through."""

    def __init__(self, address: str) -> None:
        self.passes = 1500
        self._host, _, port = address.rpartition(":")
        self._port, self._ends = int(port), list[socket.socket]()
        self._server = socket.create_server((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self._server.accept()[0], socket.create_connection((self._host, self._port))
                self._ends += near, far
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if len(data) > self.passes:
                    return  # it is sent again and again, and all that follows waits for it
                target.sendall(data)
            target.close()

    def close(self) -> None:
        for each in (self._server, *self._ends):
            each.close()


def test_two_members_between_which_packets_are_lost_are_apart_until_they_are_not(members, monkeypatch):
    """Large ones alone: both answer all probes, of each other, too."""
    monkeypatch.setattr(apart_members, "LASTS", 2.0)
    one, two, three = members(3)
    with closing(Relay(two.address)) as relay:
        ring = [(each._own, each.address) for each in (one, two, three)]
        one.watch([ring[0], (two._own, relay.address), ring[2]])
        for each in (two, three):
            each.watch(ring)
        until(lambda: one.lost)
        assert one.lost == [(["node 1"], APART)] and one.answers("node 1")
        one.watch([ring[0], (two._own, relay.address), ring[2]])
        time.sleep(3.0)
        assert len(two._served) <= 2 and len(two._links) <= 4, "what is stuck is closed"
        relay.passes = 1 << 20
        until(lambda: len(one.lost) == 2)
        assert one.lost[1] == (["node 1"], TOGETHER)
    assert two.lost == three.lost == []


def test_of_many_members_each_sends_six_messages_a_second_and_a_loss_is_reported_once_to_each(members):
    several = members(count := 8)
    begin(several)
    before, start = [each.sent for each in several], time.monotonic()
    time.sleep(2 * BEAT)
    seconds = time.monotonic() - start
    sent = [each.sent - count for each, count in zip(several, before, strict=True)]
    assert max(sent) <= 3 * (seconds / BEAT + 1)
    assert sum(sent) > 0
    several[0]._loop.call_soon_threadsafe(several[0]._report, "node 5", "a test says so")
    until(lambda: all(each.lost for each in several))
    assert all(each.lost == [(["node 5"], "a test says so")] for each in several)
    beats = 3 * (time.monotonic() - start) / BEAT
    assert sum(each.sent for each in several) - sum(before) < count * (6 + beats + 6 * 3)


class Stranger:
    """Somebody who can reach a member."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=DEADLINE)
        self.file = self.socket.makefile("rb")
        self.nonce = json.loads(self.file.readline())["nonce"]

    def read_all(self) -> None:
        with suppress(ConnectionResetError):
            self.file.read()

    def close(self) -> None:
        with suppress(OSError):
            self.file.close()
        self.socket.close()


def hello(nonce: str, theirs: str, key: bytes = SECRET, receiver: str = "node 0") -> bytes:
    parts = (nonce, theirs, WATCH, "node 1", receiver)
    said = {"nonce": nonce, "kind": WATCH, "from": "node 1", "to": receiver}
    return json.dumps(said | {"mac": signature(key, "initiator", *parts)}).encode() + b"\n"


def test_strangers_are_refused_and_logged_once_and_a_message_that_is_sent_again_is_refused(members, caplog):
    """With another secret, an earlier greeting, one for another member, cut off, too long, or not JSON."""
    one, other = members(2)
    begin([one, other])
    with closing(Stranger(one.address)) as stranger:
        earlier = hello("00", stranger.nonce)
        stranger.socket.sendall(earlier)
        answer = signature(SECRET, "responder", "00", stranger.nonce, WATCH, "node 1", "node 0")
        assert json.loads(stranger.file.readline())["mac"] == answer
        forged = {"number": 0, "body": json.dumps({"kind": "lost", "member": "node 1"}), "mac": "00"}
        stranger.socket.sendall(json.dumps(forged).encode() + b"\n")
        stranger.read_all()
    for greeting in (
        lambda nonce: hello("00", nonce, key=b"another"),
        lambda nonce: earlier,
        lambda nonce: hello("00", nonce, receiver="node 1"),
        lambda nonce: hello("00", nonce)[:20],
        lambda nonce: b"x" * 4 * LONGEST,
        lambda nonce: b'{"nonce": "\\ud800", "kind": "\\ud800", "from": "", "to": "", "mac": "\\ud800"}\n',
        lambda nonce: b"[" * 4000 + b"\n",
    ):
        with closing(Stranger(one.address)) as stranger, suppress(ConnectionError):
            stranger.socket.sendall(greeting(stranger.nonce))
            stranger.socket.shutdown(socket.SHUT_WR)
            stranger.read_all()
    until(lambda: len(one._links) == 2)
    assert one.lost == other.lost == []
    assert len([each for each in caplog.messages if "refused a message from 127.0.0.1" in each]) == 1

    async def twice() -> None:
        reader, writer = await connection(one.address)
        link = await AuthenticatedLink.initiate(reader, writer, SECRET, Purpose(WATCH, "node 1", "node 0"))
        sent: list[bytes] = []
        write = writer.write
        writer.write = lambda data: (sent.append(bytes(data)), write(data))[1]
        await link.send({"kind": "beat"})
        write(sent[0])
        with pytest.raises(OSError):
            while True:
                await link.receive()
        link.close()

    asyncio.run(asyncio.wait_for(twice(), DEADLINE))


def test_connections_that_prove_nothing_do_not_keep_members_out(members):
    one, other = members(2)
    strangers = [Stranger(one.address) for _ in range(2 * reception.MOST_STRANGERS)]
    try:
        begin([one, other])
        assert asyncio.run(state_of(one.address, SECRET, "node 1", "node 0", DEADLINE)) is State.ALIVE
        assert len(one._reception._strangers) <= reception.MOST_STRANGERS
    finally:
        for each in strangers:
            each.close()
    assert one.lost == other.lost == []


def test_a_node_timeout_that_holds_no_heartbeats_is_refused():
    for seconds in (0.9, float("nan")):
        with pytest.raises(ConfigError, match="node_timeout"):
            Settings(node_timeout=seconds)
