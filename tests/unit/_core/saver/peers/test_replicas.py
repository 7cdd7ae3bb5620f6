"""Large files that go to a partner: whole or not at all, whatever becomes of either end or the way between."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory import pages, replica_files, slots
from fastckpt._core.memory.arena import arena_path, erase
from fastckpt._core.memory.copies_folder import CopiesFolder
from fastckpt._core.memory.headroom import Headroom, MemoryLimit, lies_in_memory
from fastckpt._core.memory.held_saves import HeldSave, held_saves, kept_place
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.memory.slots import SlotBegin, SlotDone
from fastckpt._core.saver.peers import file_transfer, replica_sender, replica_transfer
from fastckpt._core.saver.peers.agent_peers import AgentPeers, NodeMemory
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replica_sender import ReplicaSender
from fastckpt._core.saver.peers.replica_transfer import LargeFile, send_replica
from fastckpt._core.saver.stats import ReplicaCounts
from fastckpt._core.storage.local.stored import digest
from fastckpt.errors import BadCheckpoint, FastckptError, ProtocolError
from fastckpt_run.events import summary
from tests.support.largest_file import largest_file

SECRET, ATTEMPT = b"secret", "token"
SHARDS = "__1_0.distcp"
SIZE = (2 << 20) + 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a MiB count as large."""
    for module in (replica_files, replica_sender):
        monkeypatch.setattr(module, "SMALL", 1 << 20)


class Keeper:
    """An agent that keeps copies."""

    def __init__(self, arena: Path, directory: Path | None = None) -> None:
        self.arena, self.folder = arena, CopiesFolder(arena, directory)
        arena.mkdir(mode=0o700)
        self.needed, self.readers = set[SaveId](), set[int]()
        in_use = lambda: bool(self.readers)  # noqa: E731
        self.files = ReplicaFiles(arena, set, lambda: self.needed, in_use, folder=self.folder)
        parity = ParityFiles(arena, set, lambda: False)
        self.peers = AgentPeers(lambda directory: NodeMemory(arena, [], self.files, parity))
        self.address = f"127.0.0.1:{self.peers.serve()}"
        self.peers.assume(PeerRound([Peer("keeper", "k", self.address)], 0, SECRET))

    def path(self, step: int) -> Path:
        return kept_place(self.folder.path, SaveId(1, step), ATTEMPT) / SHARDS

    def left(self) -> list[str]:
        """Files that are unfinished."""
        return [path.name for root in self.folder.roots for path in root.rglob(".new-*")]

    def close(self) -> None:
        self.peers.close()
        self.folder.close()
        erase(self.arena)


class Owner:
    """A node of two, which has saves of one large file and a small one."""

    def __init__(self, folder: Path, keeper: str) -> None:
        self.arena, self.slot = folder, folder / "slot-0"
        self.slot.mkdir(parents=True)
        partner = Peer("keeper", "k", keeper, host="keeper")
        self.round = PeerRound([Peer("owner", "o", ""), partner], 0, SECRET, [partner])
        self.counts = ReplicaCounts()
        self.sender = ReplicaSender("/checkpoints", None, self.counts)
        self.sender.assume(self.round)

    def save(self, step: int, files: int = 1) -> HeldSave:
        slots.begin(self.slot, SlotBegin(SaveId(1, step), frozenset({0})))
        sizes = {SHARDS: SIZE, **{f"__{number}_0.distcp": SIZE for number in range(2, files + 1)}}
        for name in sizes:
            (self.slot / name).write_bytes(bytes([step]) * SIZE)
        (self.slot / "rank_1.pt").write_bytes(b"r" * 10)
        details = {"world_size": 2, "rank": 1, "node": 1, "nodes": 2, "attempt": ATTEMPT}
        slots.commit(self.slot, 0, SlotDone(SaveId(1, step), sizes | {"rank_1.pt": 10}, details))
        (held,) = held_saves(self.arena, [self.slot])
        return held

    def send(self, step: int, common: int = 0) -> bool | None:
        return self.sender.send(self.save(step), CommonSave(SaveId(1, common) if common else None), self.round)


@pytest.fixture(params=["memory", "disk"])
def keeper(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Keeper]:
    """One that has its arena in memory, and large copies there, too, or on a disk."""
    if request.param == "disk" and lies_in_memory(tmp_path):
        pytest.skip("temporary files are in memory here")
    arena = arena_path(os.environ["FASTCKPT_SHM_DIR"], str(tmp_path), 0)
    made = Keeper(arena, tmp_path if request.param == "disk" else None)
    yield made
    made.close()
    assert not [*tmp_path.glob("fastckpt-*")] and not arena.exists()


@pytest.fixture
def owner(tmp_path: Path, keeper: Keeper) -> Iterator[Owner]:
    made = Owner(tmp_path / "owner", keeper.address)
    yield made
    made.sender.close()


def test_the_way_and_the_rate_of_copies_are_shown_once(keeper: Keeper, owner: Owner, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "fastckpt.report")
    assert owner.send(1) and owner.send(2, common=1)
    (line,) = (record.getMessage() for record in caplog.records if record.name == "fastckpt.report")
    assert f"to keeper ({keeper.address}): 2.1 MB of step 1 took" in line and line.endswith("MB/s")


def test_a_copy_counts_with_its_digest_and_the_records_of_its_rank(keeper: Keeper, owner: Owner):
    assert owner.send(5) is True
    assert keeper.path(5).read_bytes() == bytes([5]) * SIZE and keeper.left() == []
    assert held_saves(keeper.arena, []) == []  # no record says of what it is
    held = owner.save(5)
    with closing(SealedConnection.connect(keeper.address, SECRET, 10)) as link:
        name = SaveName("/checkpoints", held.id, ATTEMPT)
        file_transfer.give(link, name, held, {"rank_1.pt": b"r" * 10})
    (kept,) = held_saves(keeper.arena, [])
    assert kept.sizes == {SHARDS: SIZE, "rank_1.pt": 10} and kept.parts.keys() == {1}
    assert kept.digests[SHARDS] == digest(keeper.path(5))


@pytest.mark.parametrize("free", [9, 10])
def test_small_files_for_which_there_is_no_memory_are_refused_and_not_written(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch, free: int
):
    """Above the limit of a cgroup a write would not fail, but the agent be killed."""
    monkeypatch.setattr(file_transfer, "unreserved", lambda *_: Headroom(free, SIZE, "it", MemoryLimit.CGROUP))
    held = owner.save(5)
    refusal = (
        pytest.raises(ProtocolError, match="do not fit: it has 9 B free") if free < 10 else contextlib.nullcontext()
    )
    with closing(SealedConnection.connect(keeper.address, SECRET, 10)) as link, refusal:
        file_transfer.give(link, SaveName("/checkpoints", held.id, ATTEMPT), held, {"rank_1.pt": b"r" * 10})
    place = kept_place(keeper.arena, SaveId(1, 5), ATTEMPT)  # small files are in memory, whatever the medium
    assert (place / "rank_1.pt").exists() == (free == 10)


def test_what_a_partner_has_is_not_sent_again_unless_its_bytes_are_others(keeper: Keeper, owner: Owner):
    assert owner.send(5) and owner.send(5)
    assert owner.counts.saves == 1 and owner.counts.size == SIZE
    place = keeper.path(5)
    place.write_bytes(b"damaged")
    assert owner.send(5) and owner.counts.saves == 2 and place.read_bytes() == bytes([5]) * SIZE


def test_two_places_are_kept_and_their_memory_serves_again(keeper: Keeper, owner: Owner):
    inodes = []
    for step in range(1, 7):
        assert owner.send(step, common=step - 1)
        there = [each for each in range(1, 7) if keeper.path(each).exists()]
        assert there == [step - 1, step][step == 1 :]
        assert keeper.path(step).read_bytes() == bytes([step]) * SIZE
        inodes.append(keeper.path(step).stat().st_ino)
    assert inodes[2:] == inodes[:4][:2] * 2  # two files take turns


def test_released_memory_is_given_back_where_no_copies_come_any_more(keeper: Keeper, owner: Owner):
    for step in (1, 2, 3):
        assert owner.send(step, common=step - 1)
    keeper.files = ReplicaFiles(keeper.arena, set, lambda: {SaveId(1, 4)}, lambda: False, lambda: "copies need more")
    assert owner.send(4, common=3) is False
    assert keeper.files.release_old() and keeper.files.bytes() == 0


@pytest.mark.parametrize("alone", [False, True])
def test_small_files_are_not_given_back_while_others_rely_on_them(keeper: Keeper, owner: Owner, alone: bool):
    for step in (1, 2):
        assert owner.send(step, common=step - 1)
        with closing(SealedConnection.connect(keeper.address, SECRET, 10)) as link:
            held = owner.save(step)
            file_transfer.give(link, SaveName("/checkpoints", held.id, ATTEMPT), held, {"rank_1.pt": b"r" * 10})
    keeper.files.give_back({SaveId(1, 2)}, small=alone)
    assert [keeper.path(step).exists() for step in (1, 2)] == [False, True]
    places = [kept_place(keeper.arena, SaveId(1, step), ATTEMPT) for step in (1, 2)]
    assert [(place / "rank_1.pt").exists() for place in places] == [not alone, True]


def test_nothing_is_released_that_the_common_save_or_a_reader_needs(keeper: Keeper, owner: Owner):
    assert owner.send(1) and owner.send(2, common=1)
    keeper.readers.add(7)
    assert owner.send(3, common=2)
    assert [keeper.path(step).exists() for step in (1, 2, 3)] == [True] * 3
    keeper.readers.clear()
    keeper.needed = {SaveId(1, 2)}
    assert owner.send(4)  # the sender knows of no common save in this round: what this node knows of counts
    assert [keeper.path(step).exists() for step in (1, 2, 3, 4)] == [False, True, False, True]
    keeper.needed = {SaveId(1, 4)}
    assert keeper.files.release_old()
    assert [keeper.path(step).exists() for step in (2, 4)] == [False, True]


def send_one(link: SealedConnection, owner: Owner, step: int) -> None:
    held = owner.save(step)
    file = LargeFile(SHARDS, held.files[SHARDS], SIZE, digest(held.files[SHARDS]))
    send_replica(link, SaveName("/checkpoints", held.id, ATTEMPT), file, None)


def test_a_byte_that_changes_on_its_way_is_noticed_by_the_receiver(keeper: Keeper, owner: Owner):
    with (
        relay(keeper.address, flip=SIZE // 2) as address,
        closing(SealedConnection.connect(address, SECRET, 10)) as link,
        pytest.raises(BadCheckpoint, match="another digest"),
    ):
        send_one(link, owner, 5)
    assert not keeper.path(5).exists() and keeper.left() == []
    assert owner.send(5) and keeper.path(5).read_bytes() == bytes([5]) * SIZE


@contextlib.contextmanager
def relay(
    address: str, *, flip: int = -1, cut: int = -1, stall: int = -1, record: bytearray | None = None
) -> Iterator[str]:
    """A way to an agent that flips a byte that goes there, ends after so many bytes, or passes no more on."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    open_ones, threads = [listener], list[threading.Thread]()

    def start(work: Callable[..., None], *arguments: Any) -> None:
        threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        threads[-1].start()

    def end(*which: socket.socket) -> None:
        for each in which:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def forwards(of: socket.socket, to: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(of.recv(1 << 16)):
                if passed <= flip < passed + len(data):
                    data[flip - passed] ^= 1
                passed += len(data)
                if record is not None:
                    record.extend(data)
                if 0 <= stall < passed:
                    return
                if 0 <= cut < passed:
                    break
                to.sendall(data)
        end(of, to)

    def back(of: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := of.recv(1 << 16):
                to.sendall(data)
        end(of, to)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                inside, _ = listener.accept()
                outside = socket.create_connection((host, int(port)))
                open_ones.extend([inside, outside])
                start(forwards, inside, outside)
                start(back, outside, inside)

    start(accept)
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    end(*open_ones)
    for thread in threads:
        thread.join(10)
    for each in open_ones:
        each.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_of_a_stream_that_is_cut_nothing_is_left_and_the_next_one_is_whole(keeper: Keeper, owner: Owner):
    with (
        relay(keeper.address, cut=SIZE // 2) as address,
        closing(SealedConnection.connect(address, SECRET, 10)) as link,
        pytest.raises((FastckptError, OSError)),
    ):
        send_one(link, owner, 5)
    until(lambda: keeper.left() == [])
    assert not keeper.path(5).exists()
    assert owner.send(5) and keeper.path(5).read_bytes() == bytes([5]) * SIZE


def test_a_sender_that_stands_still_keeps_no_other_from_its_turn(keeper: Keeper, owner: Owner, tmp_path: Path):
    with relay(keeper.address, stall=SIZE // 2) as address:
        frozen = Owner(tmp_path / "frozen", address)
        thread = threading.Thread(target=frozen.send, args=(5,))
        thread.start()
        until(lambda: bool(keeper.left()))
        assert owner.send(5) and keeper.path(5).read_bytes() == bytes([5]) * SIZE
        frozen.sender.assume(frozen.round)  # another round: what is on its way ends at once
        thread.join(5)
        assert not thread.is_alive()
        frozen.sender.close()


def test_a_disk_that_takes_half_of_a_copy_costs_this_one_and_the_sender_learns_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    keeper = Keeper(arena_path(os.environ["FASTCKPT_SHM_DIR"], str(tmp_path), 0), tmp_path)
    owner = Owner(tmp_path / "owner", keeper.address)
    assert owner.send(1) and owner.send(2, common=1)
    next_one = owner.save(3)
    with largest_file(SIZE // 2):  # of what 1 has left in its place, half is written
        assert owner.sender.send(next_one, CommonSave(SaveId(1, 2)), owner.round) is False
    assert owner.counts.skipped == 1 and "a copy of 2.0 MiB cannot be written: [Errno 27]" in caplog.text
    assert keeper.left() == [] and not keeper.path(3).exists()
    assert keeper.path(2).read_bytes() == bytes([2]) * SIZE
    assert owner.send(4, common=2) is True and keeper.path(4).read_bytes() == bytes([4]) * SIZE
    owner.sender.close()
    keeper.close()


@pytest.mark.parametrize("remedy", [True, False])
def test_a_partner_without_memory_costs_copies_and_one_warning(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, remedy: bool
):
    free = Headroom(SIZE - 1, SIZE, "its memory", MemoryLimit.HOST)
    with monkeypatch.context() as full:
        full.setattr(replica_files, "headroom", lambda *_: free)
        assert owner.send(1) is False and owner.send(2) is False
    assert owner.counts.skipped == 2 and owner.counts.saves == 0
    assert caplog.text.count("FC-045") == 1 and "step 1 is not copied to keeper" in caplog.text
    assert "in 1 file): keeper: " in caplog.text
    (line,) = summary._replicas(owner.counts)
    assert line.endswith("0 saves, 0 B; 2 skipped; NO save in memory is safe from the loss of this host")
    assert keeper.left() == []
    if remedy:
        assert owner.send(3) is True and owner.counts.saves == 1


def test_a_partner_that_cannot_release_what_is_read_now_is_asked_again(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(replica_files, "headroom", lambda *_: Headroom(0, SIZE, "it", MemoryLimit.HOST))
    keeper.readers.add(7)
    assert owner.send(1) is None and "FC-045" not in caplog.text
    monkeypatch.setattr(replica_sender, "GIVE_UP", 0.0)
    assert owner.send(1) is False and "FC-045" in caplog.text  # for so long that all nodes would wait


def test_a_partner_that_is_gone_is_asked_again_until_the_save_counts_without_it(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch
):
    keeper.peers.close()
    assert owner.send(1) is None
    monkeypatch.setattr(replica_sender, "GIVE_UP", 0.0)
    assert owner.send(1) is False and owner.counts.skipped == 1


def test_a_partner_whose_memory_takes_long_to_make_is_waited_for(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch
):
    """For a file of 10 GB that is longer than an agent may be silent."""

    def allocate(descriptor: int, size: int) -> bool:
        time.sleep(1.0)
        return pages.allocate(descriptor, size)

    monkeypatch.setattr(replica_files, "allocate", allocate)
    monkeypatch.setattr(replica_sender, "TIMEOUT", 0.5)
    monkeypatch.setattr(replica_transfer, "SIGNS", 0.1)
    assert owner.send(5) is True and keeper.path(5).read_bytes() == bytes([5]) * SIZE


@contextlib.contextmanager
def closing_sender(owner: Owner) -> Iterator[Owner]:
    with closing(owner.sender):
        yield owner


def test_a_partner_that_is_silent_costs_one_wait_whatever_the_number_of_files(
    tmp_path: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
):
    """It takes connections and never answers; the other partner has its copies meanwhile."""
    monkeypatch.setattr(replica_sender, "CONNECTING", 1.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        closing_sender(Owner(tmp_path / "owner", keeper.address)) as owner,
    ):
        gone = Peer("gone", "g", f"127.0.0.1:{silent.getsockname()[1]}")
        owner.round = replace(owner.round, partners=[*owner.round.partners, gone])
        owner.sender.assume(owner.round)
        held = owner.save(5, files=12)
        since = time.monotonic()
        assert owner.sender.send(held, CommonSave(), owner.round) is None
        assert time.monotonic() - since < 2.5
        assert all((keeper.path(5).parent / name).exists() for name in held.own_files if name.endswith(".distcp"))


def test_what_has_yet_to_be_sent_when_a_round_ends_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_sender, "CONNECTING", 1.0)
    monkeypatch.setattr(replica_sender, "STREAMS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, closing_sender(Owner(tmp_path / "owner", "")) as owner:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        partners = [Peer(f"p{n}", f"m{n}", address) for n in range(6)]
        owner.round = replace(owner.round, partners=partners)
        owner.sender.assume(owner.round)
        held = owner.save(5)
        end = threading.Timer(0.2, owner.sender.assume, [replace(owner.round)])
        end.start()
        since = time.monotonic()
        assert owner.sender.send(held, CommonSave(), owner.round) is None
        assert time.monotonic() - since < 2.5
        end.join()


def test_a_save_that_is_not_copied_counts_once_however_often_that_is_tried(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch
):
    """It is asked for again until all nodes have done with it."""
    free = Headroom(SIZE - 1, SIZE, "its memory", MemoryLimit.HOST)
    monkeypatch.setattr(replica_files, "headroom", lambda *_: free)
    for _ in range(5):
        assert owner.send(1) is False
    assert owner.counts.skipped == 1
    assert owner.send(2) is False and owner.counts.skipped == 2


GOOD = {"name": SHARDS, "size": SIZE, "digest": "0" * 32, "common": []}


@pytest.mark.parametrize(
    "forged",
    [
        {"name": "../escape"},
        {"name": "/tmp/escape"},
        {"name": ".begin"},
        {"name": "a/../../escape"},
        {"name": 5},
        {"size": -1},
        {"size": 0},
        {"size": 1 << 60},
        {"size": "5"},
        {"digest": 5},
        {"common": [1]},
        {"common": ["a", "b"]},
        {"common": None},
    ],
    ids=str,
)
def test_requests_that_name_no_file_of_a_save_are_refused(keeper: Keeper, tmp_path: Path, forged: dict[str, Any]):
    save = SaveName("/checkpoints", SaveId(1, 5), ATTEMPT)
    with closing(SealedConnection.connect(keeper.address, SECRET, 10)) as link, pytest.raises(ProtocolError):
        link.ask(save.request("replicate", **(GOOD | forged)))
    assert not list(tmp_path.rglob("*escape*")) and keeper.left() == []


def test_a_stranger_is_refused_and_so_is_who_repeats_what_an_agent_has_sent(keeper: Keeper, owner: Owner):
    with pytest.raises((FastckptError, OSError)):
        SealedConnection.connect(keeper.address, b"guessed", 10)
    recorded = bytearray()
    with (
        relay(keeper.address, record=recorded) as address,
        closing(SealedConnection.connect(address, SECRET, 10)) as link,
    ):
        send_one(link, owner, 5)
    assert len(recorded) > SIZE and keeper.path(5).exists()
    keeper.path(5).unlink()
    host, _, port = keeper.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as replayer, contextlib.suppress(OSError):
        replayer.sendall(recorded)
        while replayer.recv(1 << 16):
            pass  # until it is hung up on
    assert not keeper.path(5).exists() and keeper.left() == []


def test_a_dead_owner_leaves_nothing_unfinished_and_nothing_spare(keeper: Keeper, owner: Owner):
    for step in (1, 2, 3):
        assert owner.send(step, common=step - 1)
    unfinished = keeper.path(3).with_name(".new-1234-x")
    unfinished.write_bytes(b"x")
    keeper.files.clear_away()
    assert not unfinished.exists() and not [*(keeper.folder.path / "spare").iterdir()]
    assert keeper.path(2).exists() and keeper.path(3).exists()  # copies outlive the agent that keeps them


def test_a_save_whose_rank_has_files_that_are_not_kept_is_not_held(keeper: Keeper, owner: Owner):
    held = owner.save(5)
    with closing(SealedConnection.connect(keeper.address, SECRET, 10)) as link:
        file_transfer.give(link, SaveName("/checkpoints", held.id, ATTEMPT), held, {"rank_1.pt": b"r" * 10})
    (kept,) = held_saves(keeper.arena, [])
    assert SHARDS not in kept.files and kept.sizes == {"rank_1.pt": 10}
