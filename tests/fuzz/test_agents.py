"""Agents among liars: what comes from others is answered, refused or hung up on, and those who are right are served."""

import contextlib
import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory.telemetry import PLACES
from fastckpt._core.policy.stack_groups import grouped
from fastckpt._core.saver.peers import fetcher, file_transfer, parity_rebuild
from fastckpt._core.saver.peers.common_saves import CommonSave, HeldReport
from fastckpt._core.saver.peers.file_transfer import LIST
from fastckpt._core.saver.peers.parity_rebuild import CHUNK, REBUILD, rebuild
from fastckpt._core.saver.peers.parity_transfer import send_chunk
from fastckpt._core.saver.peers.peer_server import PeerServer
from fastckpt._core.saver.peers.replica_transfer import LargeFile, send_replica
from fastckpt._core.saver.peers.replication import HELD
from fastckpt._core.saver.peers.spare_prefetch import PREFETCH
from fastckpt.errors import FastckptError
from fastckpt_run.hangs.stack_exchange import ALL_IDLE, FOUND, HANG, IDLE, STACKS
from fastckpt_run.stragglers.straggler_judge import StragglerJudge
from fastckpt_run.stragglers.straggler_watch import SUBJECT
from fastckpt_run.watch.node_channel import ASK
from tests.unit._core.saver.peers.parity_group import GROUP, NEW, OLD, SECRET, Group
from tests.unit.fastckpt_run.hangs.agents import SECRET as JOB
from tests.unit.fastckpt_run.hangs.agents import SLEEPS, CaughtWorker, HungJob

COUNT = int(os.environ.get("FASTCKPT_FUZZ_MESSAGES", "10000"))
FEW = 200
AT_ONCE = 8
GROWTH = 128 << 20
OWN = (LookupError, TypeError, ValueError, ArithmeticError)
"""Errors of these tests themselves, which believe answers."""
SIZES = {"a": (5000, 7), "b": (70_000,), "c": (), "d": (3000, 1)}
NUMBERS = pytest.mark.parametrize(
    "count", [pytest.param(FEW, id="some"), pytest.param(COUNT, marks=pytest.mark.campaign, id="many")]
)


VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 1.5, 1 << 31, 1 << 63, 1 << 70, 10**30, 1e308, float("inf"), float("nan"),
    "", "0", "..", "../../outside", "/etc/passwd", ".done-0", "a/../b", "\0", "\ud800", "x" * 5000, "9" * 5000,
    [], {}, [[]], [[[[[]]]]], [0, 0], [1, 5], {"": ""}, {"0": {}}, [None] * 3, ["model.pt", 1 << 40],
    json.loads(400 * "[" + 400 * "]"),
)  # fmt: skip
"""What is put in the place of a value."""


def untrue(message: Any, chance: random.Random) -> Any:
    """A message with one to three of its parts changed, removed, added, or exchanged for another of its parts."""
    found = json.loads(json.dumps(message))
    for _ in range(chance.randint(1, 3)):
        places = [*_places(found)]
        if not places:
            return found
        inside, at = chance.choice(places)
        match chance.randrange(6):
            case 0:
                del inside[at]
            case 1 if isinstance(inside, dict):
                inside[str(chance.choice(VALUES))] = inside.pop(at)
            case 2:
                there, other = chance.choice(places)
                inside[at] = json.loads(json.dumps(there[other]))
            case 3 if type(inside[at]) is int:
                inside[at] += chance.choice((-1, 1, 1 << 20))
            case _:
                inside[at] = json.loads(json.dumps(chance.choice(VALUES)))
    return found


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """The parts of a message: what each is in, and its key there; but for those that are nested deeply."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in [*inner]:
        if key != "ask":
            yield value, key
        if depth < 20:
            yield from _places(part, depth + 1)


class Liar(SealedConnection):
    """An end that knows the secret, and whose messages are not true."""

    chance = random.Random()
    share = 0.8

    def send(self, message: dict[str, Any]) -> None:
        super().send(untrue(message, self.chance) if self.chance.random() < self.share else message)


Call = Callable[[Group, SealedConnection], object]


def _get(group: Group, link: SealedConnection) -> None:
    file = group.members["b"].files[NEW][0]
    file_transfer.ask_for(link, NEW, file.name, file.size)
    link.receive_bytes(file.size)
    link.receive()


def _give(group: Group, link: SealedConnection) -> None:
    contents = {"rank_0.pt": b"r" * 3000, "model.pt": b"m" * 10}
    file_transfer.give(link, NEW, _held(group, "a"), contents)


def _held(group: Group, id: str) -> Any:
    member = group.members[id]
    return file_transfer.find(member.arena, [member.arena / f"slot-{number}" for number in range(2)], NEW)


def _replicate(group: Group, link: SealedConnection) -> None:
    file: LargeFile = group.members["a"].files[NEW][0]
    send_replica(link, NEW, file, OLD.id)


def _chunk(group: Group, link: SealedConnection) -> None:
    ranges = [[file.name, 1, file.size - 1] for file in group.members["b"].files[NEW]]
    size = int(link.ask(NEW.request(CHUNK, ranges=ranges))["size"])
    link.receive_bytes(min(size, 1 << 20))
    link.receive()


def _parity(group: Group, link: SealedConnection) -> None:
    send_chunk(link, OLD, group.members["a"].files[OLD], GROUP, ("a", "b"), CommonSave())


def _parity_without_a_digest(group: Group, link: SealedConnection) -> None:
    link.ask(group.request(OLD, "a", "b"))
    link.send_bytes(group.pieces(OLD, "a", "b")[0])
    link.close()


def _rebuilt(group: Group, link: SealedConnection) -> None:
    addresses = {id: group.members[id].address for id in "ad"}
    link.ask(NEW.request(REBUILD, member="c", group=[*GROUP], addresses=addresses))
    link.receive()


def _report(group: Group, link: SealedConnection) -> None:
    report = HeldReport("a", frozenset({NEW.id}), NEW.id, True, OLD.id, {"model.pt": "0" * 32}, 1, 5000)
    link.ask({"ask": HELD, "directory": NEW.directory, "known": CommonSave(OLD.id).to_json(), **report.to_json()})


CALLS: tuple[Call, ...] = (
    lambda group, link: link.ask(NEW.request(LIST)),
    lambda group, link: link.ask({"ask": PREFETCH, "known": {"none": 1}}),
    _get, _give, _replicate, _chunk, _parity, _parity_without_a_digest, _rebuilt, _report,
)  # fmt: skip


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Its reports wait for no other answer, and who lies is given up soon."""
    monkeypatch.setattr("fastckpt._core.saver.peers.common_saves.SHORTEST_WAIT", 0.0)
    monkeypatch.setattr("fastckpt._core.saver.peers.common_saves.EACH_WAIT", 0.0)
    monkeypatch.setattr("fastckpt._core.saver.peers.agent_peers.PATIENCE", 0.0)
    for module in (file_transfer, fetcher, parity_rebuild):
        monkeypatch.setattr(module, "TIMEOUT", 1.0)
    made = Group(tmp_path / "arenas", SIZES)
    made.give_all(NEW)
    yield made
    for member in made.members.values():
        member.peers.close()
        member.parity.close()


@contextlib.contextmanager
def watched(group: Group, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread ends by an error, memory stays bounded, and a peer that is right is served all the time."""
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: failures.append(failed.exc_value))
    file, served, ended = group.members["b"].files[NEW][0], 0, threading.Event()

    def serve() -> None:
        nonlocal served
        while not ended.wait(0.05) or not served:
            with group.link("b") as link:
                assert link.ask(NEW.request(LIST))["files"][file.name] == file.size
                file_transfer.ask_for(link, NEW, file.name, file.size)
                assert link.receive_bytes(file.size) == file.path.read_bytes()
                assert (link.receive() or {})["digest"] == file.digest
            served += 1

    gc.collect()
    before, threads = psutil.Process().memory_info().rss, threading.active_count()
    peer = threading.Thread(target=serve)
    peer.start()
    try:
        yield
    finally:
        ended.set()
        peer.join(60)
    before_last, served = served, 0
    serve()
    assert before_last and served
    end = time.monotonic() + 30
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.05)
    assert failures == []
    assert threading.active_count() <= threads, threading.enumerate()
    gc.collect()
    assert psutil.Process().memory_info().rss - before < GROWTH


def lie_at_once(count: int, to: tuple[str, bytes, float], say: Callable[[random.Random, Liar], object]) -> None:
    """So many messages, in as many connections as that takes, ``to`` an address with a secret and a timeout."""

    def talk(seed: int) -> None:
        chance, sent = random.Random(seed), 0
        while sent < count // AT_ONCE:
            with (
                contextlib.suppress(FastckptError, OSError, *OWN),
                closing(Liar.connect(*to)) as link,
            ):
                for _ in range(chance.randint(1, 4)):
                    sent += 1
                    say(chance, link)
            sent += 1  # the greeting

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(talk, seed) for seed in range(AT_ONCE)]:
            done.result()


@NUMBERS
def test_an_agent_survives_untrue_messages_of_who_knows_the_secret(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(Liar, "chance", random.Random(2))
    with watched(group, monkeypatch):
        to = (group.members["b"].address, SECRET, 0.2)
        lie_at_once(count, to, lambda chance, link: chance.choice(CALLS)(group, link))
    assert {path.name for path in tmp_path.iterdir()} == {"arenas"}


class LyingServer(PeerServer):
    """An agent that carries out what is asked, and then answers something else."""

    def __init__(self, honest: PeerServer) -> None:
        super().__init__(honest._handlers)
        self.set_secret(SECRET)

    def _talk(self, connected: socket.socket, host: str) -> None:
        with contextlib.suppress(FastckptError, OSError, *OWN), closing(connected):
            with self._greeting():
                connection = Liar.accept(connected, SECRET, 0.2)
            while (request := connection.receive()) is not None:
                connection.send(self._answer(connection, request))


@NUMBERS
def test_an_agent_survives_untrue_answers(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Whoever asks gets what was committed, or one of the errors that are expected of another agent."""
    monkeypatch.setattr(Liar, "chance", random.Random(3))
    monkeypatch.setattr(Liar, "share", 0.3)
    chance = random.Random(4)
    honest = group.members["b"].peers._server
    assert honest is not None
    server = LyingServer(honest)
    address, (file,) = f"127.0.0.1:{server.port}", group.members["b"].files[NEW]
    right = 0
    with closing(server):
        for _ in range(count // 4):
            into = tmp_path / "into"
            into.mkdir()
            try:
                if chance.random() < 0.6:
                    wanted = {file.name: [address]}
                    offers = fetcher.survey(NEW, wanted, SECRET)
                    fetcher.sizes_of(offers, [file.name])
                    fetcher.fetch_all(NEW, into, wanted, offers, SECRET)
                    assert (into / file.name).read_bytes() == file.path.read_bytes()
                    right += 1
                elif chance.random() < 0.5:
                    rebuild(
                        NEW, "a", GROUP, into, {"b": address} | {id: group.members[id].address for id in "cd"}, SECRET
                    )
                    for each in group.members["a"].files[NEW]:
                        assert (into / each.name).read_bytes() == each.path.read_bytes()
                    right += 1
                else:
                    with closing(SealedConnection.connect(address, SECRET, 0.2)) as link:
                        chance.choice((_give, _replicate, _parity))(group, link)
            except (FastckptError, OSError):
                pass
            for path in into.iterdir():
                path.unlink()
            into.rmdir()
    assert right > 0


QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (HANG, {"host": "host1", "silent": 5.0, "lately": 0.0}),
    (STACKS, {}),
    (ALL_IDLE, {}),
    (IDLE, {}),
    (FOUND, {"host": "host1", "groups": grouped([], 2, ["host1"]).to_json()}),
    (SUBJECT, {"since": 5, "host": "host1", "ranks": {"1": [[1, 60, 5, 20, 30, 5, 140]]}}),
)


@NUMBERS
def test_an_agent_survives_untrue_questions(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """About hangs and slow ranks, of which it asks all others then."""
    monkeypatch.setattr(Liar, "chance", random.Random(5))

    def ask(chance: random.Random, link: Liar) -> None:
        subject, body = chance.choice(QUESTIONS)
        link.ask({"ask": ASK, "from": "agent-1", "subject": subject, "body": body})

    with watched(group, monkeypatch), contextlib.ExitStack() as stack:
        workers = [CaughtWorker(SLEEPS), CaughtWorker(SLEEPS)]
        for worker in workers:
            stack.callback(worker.end)
        job = HungJob(workers, tmp_path, stack)
        judge = StragglerJudge()
        judge.begin(2)
        job.nodes[0].channel.answer(SUBJECT, judge.receive)
        lie_at_once(count, (job.peers[0].address, JOB, 5.0), ask)
        found = job.nodes[1].collect()
        assert found.groups is not None and found.groups.world == 2
        assert len(judge._open) <= 2 * PLACES
