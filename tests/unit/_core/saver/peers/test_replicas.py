"""Large files that go to a partner: whole or not at all, whatever becomes of either end or the way between."""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory import pages, replica_files
from fastckpt._core.memory.arena import arena_path, erase
from fastckpt._core.memory.copies_folder import CopiesFolder
from fastckpt._core.memory.headroom import Headroom, MemoryLimit, lies_in_memory
from fastckpt._core.memory.held_saves import HeldSave, held_saves, kept_place
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.saver.peers import file_transfer, replica_sender, replica_transfer
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replica_sender import ReplicaSender
from fastckpt._core.saver.peers.replica_transfer import LargeFile, send_replica
from fastckpt._core.saver.stats import ReplicaCounts
from fastckpt._core.storage.local.stored import digest
from fastckpt.errors import BadCheckpoint, FastckptError, ProtocolError
from fastckpt_run.events import summary
from tests.support.largest_file import largest_file
from tests.support.waits import until
from tests.unit._core.saver.peers.agents import ATTEMPT, DIRECTORY, SECRET, Agent, link_to, name_of, relay, write_save

SHARDS, STATES = "__1_0.distcp", {"rank_1.pt": b"r" * 10}
SIZE = (2 << 20) + 5
FULL = Headroom(SIZE - 1, SIZE, "its memory", MemoryLimit.HOST)
in_both_media = pytest.mark.parametrize("keeper", ["memory", "disk"], indirect=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a MiB count as large."""
    for module in (replica_files, replica_sender):
        monkeypatch.setattr(module, "SMALL", 1 << 20)


class Keeper(Agent):
    """An agent that keeps copies."""

    def __init__(self, arena: Path, directory: Path | None = None) -> None:
        arena.mkdir(mode=0o700)
        self.folder = CopiesFolder(arena, directory)
        self.needed, self.readers = set[SaveId](), set[int]()
        in_use = lambda: bool(self.readers)  # noqa: E731
        super().__init__(arena, [], ReplicaFiles(arena, set, lambda: self.needed, in_use, folder=self.folder))

    def path(self, step: int) -> Path:
        return kept_place(self.folder.path, SaveId(1, step), ATTEMPT) / SHARDS

    def has(self, step: int) -> bool:
        """It has a copy of what was sent, and nothing unfinished."""
        return self.left() == [] and self.path(step).exists() and self.path(step).read_bytes() == bytes([step]) * SIZE

    def there(self, steps: int) -> list[int]:
        return [step for step in range(1, steps + 1) if self.path(step).exists()]

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
        self.sender = ReplicaSender(DIRECTORY, None, self.counts)
        self.sender.assume(self.round)

    def have_partners(self, *partners: Peer) -> None:
        self.round = replace(self.round, partners=[*partners])
        self.sender.assume(self.round)

    def save(self, step: int, files: int = 1) -> HeldSave:
        large = {f"__{number}_0.distcp": bytes([step]) * SIZE for number in range(1, files + 1)}
        write_save(self.slot, step, large | STATES, 1)
        (held,) = held_saves(self.arena, [self.slot])
        return held

    def send(self, step: int, common: int = 0) -> bool | None:
        return self.sender.send(self.save(step), CommonSave(SaveId(1, common) if common else None), self.round)

    def send_one(self, link: SealedConnection, step: int) -> None:
        held = self.save(step)
        file = LargeFile(SHARDS, held.files[SHARDS], SIZE, digest(held.files[SHARDS]))
        send_replica(link, name_of(step), file, None)

    def give_states(self, keeper: Keeper, step: int) -> None:
        held = self.save(step)
        with keeper.link() as link:
            file_transfer.give(link, name_of(step), held, STATES)


@pytest.fixture
def keeper(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Keeper]:
    """One that has its arena in memory, and large copies there, too, or on a disk."""
    on_disk = getattr(request, "param", "") == "disk"
    if on_disk and lies_in_memory(tmp_path):
        pytest.skip("temporary files are in memory here")
    arena = arena_path(os.environ["FASTCKPT_SHM_DIR"], str(tmp_path), 0)
    made = Keeper(arena, tmp_path if on_disk else None)
    yield made
    made.close()
    assert not [*tmp_path.glob("fastckpt-*")] and not arena.exists()


@pytest.fixture
def owner(tmp_path: Path, keeper: Keeper) -> Iterator[Owner]:
    made = Owner(tmp_path / "owner", keeper.address)
    yield made
    made.sender.close()


@in_both_media
def test_a_copy_counts_with_its_digest_and_the_records_of_its_rank(
    keeper: Keeper, owner: Owner, caplog: pytest.LogCaptureFixture
):
    """What is not kept of a rank is not held; the way of copies is shown once."""
    caplog.set_level(logging.INFO, "fastckpt.report")
    assert owner.send(5) is True and keeper.has(5)
    assert held_saves(keeper.arena, []) == []  # no record says of what it is
    owner.give_states(keeper, 6)
    (kept,) = held_saves(keeper.arena, [])
    assert kept.id == SaveId(1, 6) and kept.sizes == {"rank_1.pt": 10}
    assert owner.send(6, common=5)
    (kept,) = held_saves(keeper.arena, [])
    assert kept.sizes == {SHARDS: SIZE, "rank_1.pt": 10} and kept.parts.keys() == {1}
    assert kept.digests[SHARDS] == digest(keeper.path(6))
    (line,) = (record.getMessage() for record in caplog.records if record.name == "fastckpt.report")
    assert f"to keeper ({keeper.address}): 2.1 MB of step 5 took" in line and line.endswith("MB/s")


def test_small_files_for_which_there_is_no_memory_are_refused_and_not_written(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch
):
    """Above the limit of a cgroup a write would not fail, but the agent be killed."""
    free, written = 9, kept_place(keeper.arena, SaveId(1, 5), ATTEMPT) / "rank_1.pt"
    monkeypatch.setattr(file_transfer, "unreserved", lambda *_: Headroom(free, SIZE, "it", MemoryLimit.CGROUP))
    with pytest.raises(ProtocolError, match="do not fit: it has 9 B free"):
        owner.give_states(keeper, 5)
    assert not written.exists()
    free = 10
    owner.give_states(keeper, 5)
    assert written.exists()


def test_what_a_partner_has_is_not_sent_again_unless_its_bytes_are_others(keeper: Keeper, owner: Owner):
    assert owner.send(5) and owner.send(5)
    assert owner.counts.saves == 1 and owner.counts.size == SIZE
    keeper.path(5).write_bytes(b"damaged")
    assert owner.send(5) and owner.counts.saves == 2 and keeper.has(5)


@in_both_media
def test_two_places_are_kept_whose_memory_serves_again_and_is_released_by_a_successor(keeper: Keeper, owner: Owner):
    inodes = []
    for step in range(1, 7):
        assert owner.send(step, common=step - 1) and keeper.has(step)
        assert keeper.there(6) == [step - 1, step][step == 1 :]
        inodes.append(keeper.path(step).stat().st_ino)
    assert inodes[2:] == inodes[:2] * 2  # two files take turns
    unfinished = keeper.path(6).with_name(".new-1234-x")
    unfinished.write_bytes(b"x")
    keeper.replicas.clear_away()  # as whoever adopts it
    assert not unfinished.exists() and not [*(keeper.folder.path / "spare").iterdir()]
    assert keeper.there(6) == [5, 6]  # copies outlive the agent that keeps them
    keeper.replicas = ReplicaFiles(keeper.arena, set, lambda: {SaveId(1, 7)}, lambda: False, lambda: "copies need more")
    assert owner.send(7, common=6) is False
    assert keeper.replicas.release_old() and keeper.replicas.bytes() == 0


def test_small_files_are_not_given_back_while_others_rely_on_them(keeper: Keeper, owner: Owner):
    for step in (1, 2):
        assert owner.send(step, common=step - 1)
        owner.give_states(keeper, step)
    places = [kept_place(keeper.arena, SaveId(1, step), ATTEMPT) for step in (1, 2)]
    for alone in (False, True):
        keeper.replicas.give_back({SaveId(1, 2)}, small=alone)
        assert keeper.there(2) == [2]
        assert [(place / "rank_1.pt").exists() for place in places] == [not alone, True]


@in_both_media
def test_nothing_is_released_that_the_common_save_or_a_reader_needs(keeper: Keeper, owner: Owner):
    assert owner.send(1) and owner.send(2, common=1)
    keeper.readers.add(7)
    assert owner.send(3, common=2) and keeper.there(3) == [1, 2, 3]
    keeper.readers.clear()
    keeper.needed = {SaveId(1, 2)}
    assert owner.send(4)  # the sender knows of no common save in this round: what this node knows of counts
    assert keeper.there(4) == [2, 4]
    keeper.needed = {SaveId(1, 4)}
    assert keeper.replicas.release_old() and keeper.there(4) == [4]


def test_a_stream_that_is_damaged_or_cut_leaves_nothing_and_the_next_one_is_whole(keeper: Keeper, owner: Owner):
    harms: list[tuple[str, Any]] = [("flip", BadCheckpoint), ("cut", (FastckptError, OSError))]
    for step, (harm, error) in enumerate(harms, 5):
        with (
            relay(keeper.address, SIZE // 2, harm) as address,
            link_to(address) as link,
            pytest.raises(error, match="another digest" if harm == "flip" else None),
        ):
            owner.send_one(link, step)
        until(lambda: keeper.left() == [])
        assert not keeper.path(step).exists()
        assert owner.send(step) and keeper.has(step)


def test_a_sender_that_stands_still_keeps_no_other_from_its_turn(keeper: Keeper, owner: Owner, tmp_path: Path):
    with relay(keeper.address, SIZE // 2, "stall") as address:
        frozen = Owner(tmp_path / "frozen", address)
        thread = threading.Thread(target=frozen.send, args=(5,))
        thread.start()
        until(keeper.left)
        assert owner.send(5) and keeper.path(5).read_bytes() == bytes([5]) * SIZE
        frozen.sender.assume(frozen.round)  # another round: what is on its way ends at once
        thread.join(5)
        assert not thread.is_alive()
        frozen.sender.close()


@pytest.mark.parametrize("keeper", ["disk"], indirect=True)
def test_a_disk_that_takes_half_of_a_copy_costs_this_one_and_the_sender_learns_why(
    keeper: Keeper, owner: Owner, caplog: pytest.LogCaptureFixture
):
    assert owner.send(1) and owner.send(2, common=1)
    next_one = owner.save(3)
    with largest_file(SIZE // 2):  # of what 1 has left in its place, half is written
        assert owner.sender.send(next_one, CommonSave(SaveId(1, 2)), owner.round) is False
    assert owner.counts.skipped == 1 and "a copy of 2.0 MiB cannot be written: [Errno 27]" in caplog.text
    assert keeper.has(2) and not keeper.path(3).exists()
    assert owner.send(4, common=2) is True and keeper.has(4)


def test_a_partner_without_memory_costs_copies_and_one_warning(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A save that is not copied counts once: it is asked for again until all nodes have done with it."""
    with monkeypatch.context() as full:
        full.setattr(replica_files, "headroom", lambda *_: FULL)
        assert [owner.send(step) for step in (1, 1, 1, 2)] == [False] * 4
    assert owner.counts.skipped == 2 and owner.counts.saves == 0
    assert caplog.text.count("FC-045") == 1 and "step 1 is not copied to keeper" in caplog.text
    (line,) = summary._replicas(owner.counts)
    assert line.endswith("0 saves, 0 B; 2 skipped; NO save in memory is safe from the loss of this host")
    assert keeper.left() == []
    assert owner.send(3) is True and owner.counts.saves == 1


@pytest.mark.parametrize("gone", [False, True])
def test_a_partner_that_is_gone_or_cannot_release_what_is_read_now_is_asked_again_for_a_while(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: bool
):
    """For no longer: all nodes would wait."""
    monkeypatch.setattr(replica_files, "headroom", lambda *_: FULL)
    keeper.peers.close() if gone else keeper.readers.add(7)
    assert owner.send(1) is None and "FC-045" not in caplog.text
    monkeypatch.setattr(replica_sender, "GIVE_UP", 0.0)
    assert owner.send(1) is False and owner.counts.skipped == 1 and "FC-045" in caplog.text


def test_a_partner_whose_memory_takes_long_to_make_is_waited_for(
    keeper: Keeper, owner: Owner, monkeypatch: pytest.MonkeyPatch
):
    """For a file of 10 GB that is longer than an agent may be silent."""

    def allocate(descriptor: int, size: int) -> bool:
        time.sleep(0.6)
        return pages.allocate(descriptor, size)

    monkeypatch.setattr(replica_files, "allocate", allocate)
    monkeypatch.setattr(replica_sender, "TIMEOUT", 0.3)
    monkeypatch.setattr(replica_transfer, "SIGNS", 0.05)
    assert owner.send(5) is True and keeper.has(5)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where connections are taken and nothing is ever answered."""
    monkeypatch.setattr(replica_sender, "CONNECTING", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_partner_that_is_silent_costs_one_wait_whatever_the_number_of_files(
    keeper: Keeper, owner: Owner, silent: str
):
    """The other partner has its copies meanwhile."""
    owner.have_partners(*owner.round.partners, Peer("gone", "g", silent))
    held = owner.save(5, files=12)
    since = time.monotonic()
    assert owner.sender.send(held, CommonSave(), owner.round) is None
    assert time.monotonic() - since < 2
    assert all((keeper.path(5).parent / name).exists() for name in held.own_files if name.endswith(".distcp"))


def test_what_has_yet_to_be_sent_when_a_round_ends_is_not_begun(owner: Owner, silent: str, monkeypatch):
    monkeypatch.setattr(replica_sender, "STREAMS", 1)
    owner.have_partners(*[Peer(f"p{n}", f"m{n}", silent) for n in range(6)])
    held = owner.save(5)
    end = threading.Timer(0.1, owner.sender.assume, [replace(owner.round)])
    end.start()
    since = time.monotonic()
    assert owner.sender.send(held, CommonSave(), owner.round) is None
    assert time.monotonic() - since < 1.5
    end.join()


def test_requests_that_name_no_file_of_a_save_are_refused(keeper: Keeper, tmp_path: Path):
    names = [{"name": name} for name in ("../escape", "/tmp/escape", ".begin", "a/../../escape", 5)]
    sizes = [{"size": size} for size in (-1, 0, 1 << 60, "5")]
    for forged in (*names, *sizes, {"digest": 5}, {"common": [1]}, {"common": None}):
        fields: dict[str, Any] = {"name": SHARDS, "size": SIZE, "digest": "0" * 32, "common": []} | forged
        with keeper.link() as link, pytest.raises(ProtocolError):
            link.ask(name_of(5).request("replicate", **fields))
    assert not list(tmp_path.rglob("*escape*")) and keeper.left() == []
