"""Folders on a disk with large copies: found by who adopts the arena, removed with it, and swept when it is gone."""

import fcntl
import logging
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import census, copies_folder, replica_files
from fastckpt._core.memory.arena import Arena
from fastckpt._core.memory.copies_folder import CopiesFolder, folders_of, roots_of, sweep_folders
from fastckpt._core.memory.held_saves import held_saves, keep
from fastckpt._core.memory.ownership import OWNER
from fastckpt._core.memory.parity_records import whole_parities
from fastckpt._core.memory.records import read_record, write_record
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.memory.slots import SlotDone
from fastckpt._core.saver.peers.parity_files import ChunkRequest, ParityFiles
from fastckpt._core.storage.local.stored import digest
from fastckpt.errors import ArenaTooSmall
from tests.unit._core.memory.conftest import killed

ATTEMPT, SHARDS, SIZE = "token", "__1_0.distcp", (1 << 20) + 5
DETAILS = {"world_size": 2, "rank": 1, "node": 1, "nodes": 2, "attempt": ATTEMPT}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of half a MiB count as large."""
    monkeypatch.setattr(replica_files, "SMALL", 1 << 19)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def arena(path: Path) -> Iterator[Arena]:
    made = Arena.open(path, "/checkpoints")
    yield made
    if path.exists():
        made.remove()


class Keeper:
    """What an agent keeps of one other node, in an arena and a directory."""

    def __init__(self, arena: Path, directory: Path | None) -> None:
        self.arena, self.needed = arena, set[SaveId]()
        self.folder = CopiesFolder(arena, directory)
        self.files = ReplicaFiles(arena, set, lambda: self.needed, lambda: False, folder=self.folder)

    def keep(self, step: int) -> Path:
        """Keep a save of one large file; where that is."""
        id, data = SaveId(1, step), bytes([step]) * SIZE
        self.files.make_way(id, next(iter(self.needed), None))
        with self.files.receive(id, ATTEMPT, SHARDS, SIZE) as (descriptor, is_whole):
            os.pwrite(descriptor, data, 0)
            is_whole(xxhash.xxh3_128_hexdigest(data))
        keep(self.arena, id, ATTEMPT, {1: SlotDone(id, {SHARDS: SIZE}, DETAILS)}, {}, {})
        return held(self.arena)[step]


def held(arena: Path) -> dict[int, Path]:
    """The large file of each save that has it."""
    return {each.id.step: each.files[SHARDS] for each in held_saves(arena, []) if SHARDS in each.files}


def test_large_copies_are_in_a_private_folder_which_an_adopter_finds_and_which_goes_with_the_arena(arena, disk):
    (disk / "fastckpt-of-another-tool").mkdir()
    keeper = Keeper(arena.path, disk)
    assert [*disk.iterdir()] == [disk / "fastckpt-of-another-tool"]  # nothing before there is something to keep
    killed(lambda: keeper.keep(5))
    path = held(arena.path)[5]
    assert path.is_relative_to(disk) and path.read_bytes() == bytes([5]) * SIZE
    assert not [file for file in arena.path.rglob("*") if file.is_file() and file.stat().st_size > 1 << 19]
    unfinished = path.with_name(".new-1234-x")
    unfinished.write_bytes(b"x")
    successor = Keeper(arena.path, disk)
    sweep_folders(disk)
    successor.files.clear_away()
    assert held(arena.path) == {5: path} and not unfinished.exists()
    assert successor.files.has(SaveId(1, 5), ATTEMPT, SHARDS, SIZE, digest(path)) and successor.files.bytes() == SIZE
    folder = successor.folder.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert successor.keep(6).is_relative_to(folder) and path.is_relative_to(folder)
    successor.folder.close()
    arena.remove()
    assert [*disk.iterdir()] == [disk / "fastckpt-of-another-tool"]


@pytest.mark.parametrize("before", [True, False], ids=["disk to memory", "memory to disk"])
def test_copies_in_the_former_medium_are_held_until_newer_ones_are_common(arena: Arena, disk: Path, before: bool):
    former = Keeper(arena.path, disk if before else None)
    path = former.keep(5)
    former.folder.close()
    keeper = Keeper(arena.path, None if before else disk)
    keeper.needed = {SaveId(1, 5)}
    newer = keeper.keep(6)
    assert held(arena.path) == {5: path, 6: newer} and newer.is_relative_to(disk) is not before
    keeper.needed = {SaveId(1, 6)}
    assert keeper.files.release_old()
    assert held(arena.path) == {6: newer} and not path.exists()
    assert len([*disk.glob("fastckpt-*")]) == (0 if before else 1)
    assert roots_of(arena.path) == [arena.path, *disk.glob("fastckpt-*")]
    keeper.folder.close()


GROUP = ("a", "b", "c")


def test_parity_is_kept_on_a_disk_and_in_the_former_medium_until_newer_is_common(arena: Arena, disk: Path):
    needed = set[SaveId]()

    def give(parity: ParityFiles, step: int) -> None:
        for member in ("a", "b"):
            files = ((f"{member}.distcp", 2 * SIZE, "0" * 32),)
            request = ChunkRequest(SaveId(1, step), ATTEMPT, GROUP, "c", member, files, next(iter(needed), None))
            place = parity.admit(request)
            assert place is not None
            place.add(member, 0, memoryview(bytearray([ord(member) ^ step]) * SIZE), "1" * 32)
            parity.came(place)

    folder = CopiesFolder(arena.path, disk)
    give(ParityFiles(arena.path, lambda: needed, lambda: False, 8 << 20, folder), 5)
    (block,) = disk.rglob("block")
    assert block.read_bytes() == bytes([ord("a") ^ ord("b")]) * SIZE
    assert whole_parities(arena.path, SaveId(1, 5), ATTEMPT)
    folder.close()
    needed = {SaveId(1, 5)}
    in_memory = ParityFiles(arena.path, lambda: needed, lambda: False, 8 << 20)
    give(in_memory, 6)
    assert whole_parities(arena.path, SaveId(1, 5), ATTEMPT)
    needed = {SaveId(1, 6)}
    give(in_memory, 7)
    assert not whole_parities(arena.path, SaveId(1, 5), ATTEMPT) and not [*disk.rglob("block")]
    assert whole_parities(arena.path, SaveId(1, 6), ATTEMPT)
    in_memory.close()


def test_a_directory_that_is_removed_is_named_and_copies_go_on_when_it_is_back(
    arena: Arena, disk: Path, caplog: pytest.LogCaptureFixture
):
    keeper = Keeper(arena.path, disk)
    keeper.keep(5)
    shutil.rmtree(disk)
    for _ in range(2):
        with pytest.raises(ArenaTooSmall, match=f"no copies can be kept in {disk}: .*No such file"):
            keeper.keep(6)
    assert caplog.text.count(f"no copies can be kept in {disk}") == 1 and held(arena.path) == {}
    assert "Make it again, or name another" in caplog.text and "FC-045" in caplog.text
    disk.mkdir()
    with caplog.at_level(logging.INFO):
        assert keeper.keep(7).read_bytes() == bytes([7]) * SIZE
        assert keeper.keep(8).read_bytes() == bytes([8]) * SIZE
    assert caplog.text.count(f"copies of other hosts' files are kept in {disk} again") == 1
    shutil.rmtree(keeper.folder.path)  # the folder alone: it is made again at once
    assert keeper.keep(8).read_bytes() == bytes([8]) * SIZE and held(arena.path).keys() == {8}
    keeper.folder.close()


# --- sweeps


def of_dead_owner(disk: Path, arena: Path) -> Path:
    """The folder that an agent has left that was killed."""
    killed(lambda: CopiesFolder(arena, disk).ensure())
    (folder,) = folders_of(arena)
    return folder


def test_a_folder_is_swept_once_its_arena_is_gone(arena: Arena, disk: Path):
    """And its owner, who knows it again where the arena is made again."""
    path = of_dead_owner(disk, arena.path)
    sweep_folders(disk)
    assert path.is_dir() and folders_of(arena.path) == [path]
    (arena.path / copies_folder.RECORD).unlink()  # the arena was removed, and another made in its place
    sweep_folders(disk)
    assert not [*disk.iterdir()]
    folder = CopiesFolder(arena.path, disk)
    folder.ensure()
    (arena.path / copies_folder.RECORD).unlink()
    killed(lambda: sweep_folders(disk))
    assert folder.path.is_dir()
    folder.ensure()
    assert folders_of(arena.path) == [folder.path]
    folder.close()


def test_a_folder_of_another_boot_is_swept_if_this_host_has_made_it(arena: Arena, disk: Path):
    path = of_dead_owner(disk, arena.path)
    for host in ("another", socket.gethostname()):
        write_record(path / OWNER, read_record(path / OWNER) | {"boot": "an earlier one", "host": host})
        sweep_folders(disk)
        assert path.exists() is (host == "another")


def test_what_others_have_in_the_directory_is_left_as_it_is(disk: Path):
    key = f"fastckpt-{os.getuid()}-{'0' * 16}"
    (disk / f"{key}.copies").mkdir()
    (disk / f"{key}.copies-12345678.bak").mkdir()
    (disk / f"{key}.copies-00000001").write_text("a file")
    (disk / f"{key}.copies-00000002").mkdir(mode=0o755)
    (disk / f"fastckpt-{os.getuid() + 1}-{'0' * 16}.copies-00000003").mkdir(mode=0o700)
    (disk / f"{key}.copies-00000004").symlink_to(disk)
    (disk / f"{key}.copies-00000005").mkdir(mode=0o700)  # one that is being made has no owner yet
    before = sorted(disk.rglob("*"))
    sweep_folders(disk)
    assert sorted(disk.rglob("*")) == before
    os.utime(disk / f"{key}.copies-00000005", (0, 0))
    sweep_folders(disk)
    assert not (disk / f"{key}.copies-00000005").exists()
    (disk / f"{key}.removed-00000006" / "kept").mkdir(parents=True)
    (disk / f"{key}.removed-00000006").chmod(0o700)  # amid whose removal an agent died
    sweep_folders(disk)
    assert not (disk / f"{key}.removed-00000006").exists() and len([*disk.iterdir()]) == 6


def test_a_record_that_names_anything_but_a_folder_of_this_arena_is_not_followed(arena: Arena):
    for forged in ("relative", "/", "/etc", 5, None):
        write_record(arena.path / copies_folder.RECORD, {"folders": [forged]})
        assert folders_of(arena.path) == []


def test_a_lock_of_another_process_on_the_folder_leaves_copies_out_and_clean_removes_it_with_the_arena(
    arena: Arena, disk: Path
):
    path = of_dead_owner(disk, arena.path)
    with (path / OWNER).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        folder = CopiesFolder(arena.path, disk)
        with pytest.raises(ArenaTooSmall, match="has another owner"):
            folder.ensure()
    folder.ensure()
    assert folder.path == path
    folder.close()
    arena.release()
    (entry,) = [each for each in census.census(arena.path.parent) if each.path == arena.path]
    census.clean(entry)
    assert not path.exists() and not arena.path.exists()
