"""Files between two agents: each arrives as it was committed, or the next source is asked."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory import slots
from fastckpt._core.memory.held_saves import held_saves
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.memory.slots import SlotBegin, SlotDone
from fastckpt._core.saver.peers import fetcher, file_transfer
from fastckpt._core.saver.peers.agent_peers import AgentPeers, NodeMemory
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.slot import Slot
from fastckpt._core.storage.local.stored import digest
from fastckpt.errors import BadCheckpoint, FastckptError, ProtocolError

SECRET = b"secret"
SAVE = SaveName("/checkpoints", SaveId(1, 5), "token")
SIZE = (5 << 20) + 3


class Source:
    """An agent that holds a save of two ranks on two nodes."""

    def __init__(self, folder: Path, node: int = 0, data: bytes = b"m" * SIZE, *, digests: bool = True) -> None:
        self.arena, self.slot = folder, folder / "slot-0"
        self.slot.mkdir(parents=True)
        self.model, self.own = self.slot / "model.pt", self.slot / f"rank_{node}.pt"
        self.model.write_bytes(data)
        self.own.write_bytes(b"r" * 100)
        details = {"world_size": 2, "rank": node, "node": node, "nodes": 2, "attempt": "token"}
        slots.begin(self.slot, SlotBegin(SAVE.id, frozenset({0})))
        files = {path.name: path.stat().st_size for path in (self.model, self.own)}
        slots.commit(self.slot, 0, SlotDone(SAVE.id, files, details))
        if digests:
            slots.write_digests(self.slot, SAVE.id, {path.name: digest(path) for path in (self.model, self.own)})
        replicas = ReplicaFiles(folder, set, set, lambda: False)
        parity = ParityFiles(folder, set, lambda: False)
        self.peers = AgentPeers(lambda directory: NodeMemory(folder, [Slot(self.slot)], replicas, parity))
        self.address = f"127.0.0.1:{self.peers.serve()}"
        self.peers.assume(PeerRound([Peer("a", "m", self.address)], 0, SECRET))


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Callable[..., Source]]:
    made: list[Source] = []

    def make(*args: Any, **options: Any) -> Source:
        made.append(Source(tmp_path / f"source-{len(made)}", *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.peers.close()


def fetched(into: Path, *given: Source, name: str = "model.pt") -> fetcher.FetchedFiles:
    wanted = {name: [source.address for source in given]}
    offers = fetcher.survey(SAVE, wanted, SECRET)
    return fetcher.fetch_all(SAVE, into, wanted, offers, SECRET)


@pytest.mark.parametrize("digests", [True, False])
def test_a_file_arrives_as_it_was_committed(sources: Callable[..., Source], tmp_path: Path, digests: bool):
    source = sources(digests=digests)
    files = fetched(tmp_path / "into", source)
    assert (tmp_path / "into/model.pt").read_bytes() == source.model.read_bytes()
    assert files.digests == {"model.pt": digest(source.model)} and files.sizes == {"model.pt": SIZE}
    assert files.parts[0].details["rank"] == 0


def damage_byte(source: Source) -> None:
    with source.model.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"x")


def cut_short(source: Source) -> None:
    source.model.write_bytes(b"m")


def begin_again(source: Source) -> None:
    slots.clear(source.slot)


def hang_up(source: Source) -> None:
    source.peers.close()


@pytest.mark.parametrize("fault", [damage_byte, cut_short, begin_again, hang_up])
def test_a_source_that_cannot_give_a_file_is_passed_over(
    sources: Callable[..., Source], tmp_path: Path, fault: Callable[[Source], None], caplog: pytest.LogCaptureFixture
):
    first, second = sources(), sources()
    fault(first)
    fetched(tmp_path / "into", first, second)
    assert (tmp_path / "into/model.pt").read_bytes() == second.model.read_bytes()
    assert f"from {first.address}" in caplog.text
    fault(second)
    with pytest.raises((FastckptError, OSError)):
        fetched(tmp_path / "nothing", first, second)
    assert not (tmp_path / "nothing/model.pt").exists()


def through(address: str, flip: int) -> tuple[str, socket.socket]:
    """A relay to an agent that flips a byte of what comes back."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(of: socket.socket, to: socket.socket, flipped: int) -> None:
        passed = 0
        while data := of.recv(1 << 16):
            if passed <= flipped < passed + len(data):
                data = bytearray(data)
                data[flipped - passed] ^= 1
            passed += len(data)
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)

    def relay() -> None:
        while True:
            try:
                inside, _ = listener.accept()
            except OSError:
                return
            outside = socket.create_connection((host, int(port)))
            threads = [
                threading.Thread(target=pump, args=(inside, outside, -1)),
                threading.Thread(target=pump, args=(outside, inside, flip)),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            inside.close()
            outside.close()

    threading.Thread(target=relay, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}", listener


def test_a_byte_that_changes_on_its_way_is_noticed(sources: Callable[..., Source], tmp_path: Path):
    source = sources()
    address, listener = through(source.address, flip=SIZE // 2)
    with closing(listener), closing(SealedConnection.connect(address, SECRET, 10)) as link:
        with pytest.raises(BadCheckpoint, match="came damaged"):
            file_transfer.fetch(link, SAVE, "model.pt", SIZE, tmp_path / "into")
        listener.shutdown(socket.SHUT_RDWR)
    assert [*(tmp_path / "into").iterdir()] == []


@pytest.mark.parametrize("name", ["../owner", "/etc/passwd", "nothing.pt", 5, None])
def test_only_files_of_the_save_are_given(sources: Callable[..., Source], name: object):
    with closing(SealedConnection.connect(sources().address, SECRET, 10)) as link:
        with pytest.raises(ProtocolError, match="is no file of step 5"):
            link.ask(SAVE.request("get", name=name))
        assert link.ask(SAVE.request("list"))["files"].keys() == {"model.pt", "rank_0.pt"}


@pytest.mark.parametrize("name", ["../escape", "/tmp/escape", ".begin", "a/../../escape"])
def test_nobody_can_have_files_kept_outside_the_save(sources: Callable[..., Source], tmp_path: Path, name: str):
    source = sources()
    (held,) = held_saves(source.arena, [source.slot])
    with closing(SealedConnection.connect(source.address, SECRET, 10)) as link, pytest.raises(ProtocolError):
        file_transfer.give(link, SAVE, held, {name: b"data"})
    assert not list(tmp_path.rglob("*escape*"))


def test_small_files_are_kept_for_another_node_and_given_back(sources: Callable[..., Source], tmp_path: Path):
    keeper, other = sources(), sources(1)
    (held,) = held_saves(other.arena, [other.slot])
    with closing(SealedConnection.connect(keeper.address, SECRET, 10)) as link:
        file_transfer.give(link, SAVE, held, {"rank_1.pt": b"r" * 100})
    (kept,) = held_saves(keeper.arena, [keeper.slot])
    assert kept.parts.keys() == {0, 1} and kept.files["rank_1.pt"].read_bytes() == b"r" * 100
    assert kept.files["model.pt"] == keeper.model
    files = fetched(tmp_path / "into", keeper, name="rank_1.pt")
    assert files.parts[1] == held.parts[1]


def test_what_was_fetched_is_a_save_of_the_ranks_that_it_is_of(sources: Callable[..., Source], tmp_path: Path):
    source, other = sources(), sources(1)
    (held,) = held_saves(other.arena, [other.slot])
    with closing(SealedConnection.connect(source.address, SECRET, 10)) as link:
        file_transfer.give(link, SAVE, held, {"rank_1.pt": b"r" * 100})
    into = tmp_path / "into"
    into.mkdir()
    wanted = {name: [source.address] for name in ("model.pt", "rank_1.pt")}
    files = fetcher.fetch_all(SAVE, into, wanted, fetcher.survey(SAVE, wanted, SECRET), SECRET)
    assert not fetcher.make_ours(into, SAVE, files, [2], 1)
    assert slots.read(into).committed is None
    assert fetcher.make_ours(into, SAVE, files, [1], 1)
    records = slots.read(into)
    assert records.committed == SAVE.id and records.files == {"model.pt": SIZE, "rank_1.pt": 100}
    assert records.details == held.details and records.digests == dict(files.digests)
