"""Ownership of an arena, its state after the owner, and refusals."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import Arena, arena_path
from fastckpt._core.memory.presence import Presence
from fastckpt._core.memory.records import names_in
from fastckpt._core.memory.slots import images_in
from fastckpt.errors import ArenaInUse, ArenaTooSmall, FastckptError


@pytest.fixture
def path() -> Path:
    return arena_path(os.environ["FASTCKPT_SHM_DIR"], "/checkpoints", 0)


@pytest.fixture
def arena(path: Path) -> Iterator[Arena]:
    arena = Arena.open(path, "/checkpoints")
    yield arena
    arena.remove()


def test_the_path_of_an_arena_depends_on_user_directory_and_node(path: Path):
    others = [
        arena_path(str(path.parent), *key) for key in (("/checkpoints", 1), ("/checkpoint", 0), ("/checkpoints/", 0))
    ]
    assert len({path, *others}) == 4
    assert f"-{os.getuid()}-" in path.name
    assert arena_path(str(path.parent), "/checkpoints", 0) == path


def test_an_arena_is_readable_by_its_user_alone(arena: Arena):
    arena.make_slots(2)
    arena.reserve(arena.slots[0], "model.pt", 4096)
    assert arena.path.stat().st_mode & 0o777 == 0o700
    assert all(slot.stat().st_mode & 0o777 == 0o700 for slot in arena.slots)
    files = [file for file in arena.path.rglob("*") if file.is_file()]
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_images_of_an_arena_may_be_in_subdirectories(arena: Arena):
    arena.make_slots(1)
    [slot] = arena.slots
    sizes = {"model.pt": 4096, "optimizer_0/.metadata": 4096, "optimizer_0/__0_0.distcp": 8192}
    for name, size in sizes.items():
        arena.reserve(slot, name, size)
    assert images_in(slot) == sizes
    assert all(path.stat().st_mode & 0o077 == 0 for path in arena.path.rglob("*"))
    arena.reserve(slot, "optimizer_0/__0_0.distcp", 12288)
    assert images_in(slot) == sizes | {"optimizer_0/__0_0.distcp": 12288}


def test_an_arena_with_a_living_owner_is_refused_and_names_it(arena: Arena):
    with pytest.raises(
        ArenaInUse,
        match=rf"/checkpoints is in use by another job on this host: process {os.getpid()} on .*, started 20\d\d-",
    ):
        Arena.open(arena.path, "/checkpoints")


def test_a_released_arena_is_adopted_with_its_checkpoints(path: Path):
    first = Arena.open(path, "/checkpoints")
    first.make_slots(3)
    (first.slots[1] / "model.pt").write_bytes(b"kept")
    assert not first.adopted
    first.release()
    second = Arena.open(path, "/checkpoints")
    assert second.adopted and second.slots == first.slots
    assert (second.slots[1] / "model.pt").read_bytes() == b"kept"
    second.remove()
    assert not path.exists()


def test_an_arena_of_a_killed_owner_is_adopted(path: Path):
    owner = subprocess.Popen(
        [sys.executable, "-c", f"""
import os, pathlib, signal
from fastckpt._core.memory.arena import Arena
Arena.open(pathlib.Path({str(path)!r}), "/checkpoints").make_slots(2)
os.kill(os.getpid(), signal.SIGKILL)
"""],
    )  # fmt: skip
    assert owner.wait(60) == -9
    arena = Arena.open(path, "/checkpoints")
    assert arena.adopted and len(arena.slots) == 2
    arena.remove()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777, 0o1777])
def test_an_arena_accessible_to_others_is_refused(path: Path, mode: int):
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ArenaInUse, match="not a private directory"):
        Arena.open(path, "/checkpoints")
    path.rmdir()


def test_a_symbolic_link_in_place_of_an_arena_is_refused(path: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)
    with pytest.raises(ArenaInUse, match="not a private directory"):
        Arena.open(path, "/checkpoints")
    assert list(elsewhere.iterdir()) == []
    path.unlink()


@pytest.mark.parametrize("what", ["dangling link", "file"])
def test_a_file_in_place_of_an_arena_is_refused(path: Path, tmp_path: Path, what: str):
    path.symlink_to(tmp_path / "nowhere") if what == "dangling link" else path.touch(0o700)
    with pytest.raises((FastckptError, FileExistsError)):
        Arena.open(path, "/checkpoints")
    assert not (tmp_path / "nowhere").exists()
    path.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to somebody else")
def test_an_arena_of_another_user_is_refused(path: Path):
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(ArenaInUse, match="owner 65534"):
        Arena.open(path, "/checkpoints")
    path.rmdir()


def test_symbolic_links_within_an_arena_are_not_followed(path: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.mkdir(mode=0o700)
    (path / "owner").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        Arena.open(path, "/checkpoints")
    (path / "owner").unlink()
    (path / "slot-0").symlink_to(tmp_path)
    arena = Arena.open(path, "/checkpoints")
    arena.make_slots(2)
    for name in (".begun-model.pt", "model.pt"):
        (arena.slots[0] / name).symlink_to(victim)
    arena.reserve(arena.slots[0], "model.pt", len("precious"))
    (arena.slots[0] / "model.pt").write_text("ours")
    arena.remove()
    assert victim.read_text() == "precious" and victim.parent.is_dir()


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_foreign_files_in_an_arena_are_replaced_and_block_nobody(path: Path, kind: str):
    arena = Arena.open(path, "/checkpoints")
    arena.make_slots(2)
    names = ["slot-7", "slot-0/model.pt", "slot-0/.begun-model.pt", "identity"]
    for name in names:
        make_strange(path / name, kind)
    arena.release()
    arena = Arena.open(path, "/checkpoints")
    arena.make_slots(2)
    assert not arena.claim_for("mark") and arena.claim_for("mark")
    arena.reserve(arena.slots[0], "model.pt", 4096)
    assert (arena.slots[0] / "model.pt").stat().st_size == 4096
    arena.remove()


@pytest.mark.parametrize("name", ["owner", "writers"])
def test_an_arena_lock_that_is_no_file_is_an_error_and_blocks_nobody(path: Path, name: str):
    path.mkdir(mode=0o700)
    os.mkfifo(path / name)
    with pytest.raises(OSError, match="not a regular file"):
        Presence(path) if name == "writers" else Arena.open(path, "/checkpoints")
    shutil.rmtree(path)


def make_strange(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        (path / "within").mkdir(parents=True)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))


def test_concurrent_openers_of_an_arena_agree_on_one_owner(path: Path):
    """Also while former owners remove it."""
    owners, errors, most = [], [], [0]
    lock = threading.Lock()

    def come() -> None:
        for _ in range(30):
            try:
                arena = Arena.open(path, "/checkpoints")
            except (ArenaInUse, FileNotFoundError) as error:
                errors.append(error)
                continue
            with lock:
                owners.append(arena)
                most[0] = max(most[0], len(owners))
            time.sleep(0.0005)
            with lock:
                owners.remove(arena)
            arena.remove()

    threads = [threading.Thread(target=come) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    shutil.rmtree(path, ignore_errors=True)


def test_adoption_waits_for_writers_of_the_former_owner(arena: Arena):
    """This process is one: it does not kill itself."""
    assert arena.evict_writers(0)
    writer = Presence(arena.path)
    assert not arena.evict_writers(0.05)
    threading.Timer(0.1, writer.close).start()
    assert arena.evict_writers(60)


def test_two_writers_hold_an_arena_until_both_have_closed(arena: Arena):
    first, second = Presence(arena.path), Presence(arena.path)
    first.close()
    assert not arena.evict_writers(0)
    second.close()
    assert arena.evict_writers(0)


def test_an_arena_has_the_requested_slots_and_those_it_had(arena: Arena):
    arena.make_slots(3)
    (arena.slots[1] / "model.pt").touch()
    arena.make_slots(2)
    assert [slot.name for slot in arena.slots] == ["slot-0", "slot-1", "slot-2"]
    arena.drop(arena.slots[2])
    assert [slot.name for slot in arena.slots] == ["slot-0", "slot-1"]
    assert sorted(p.name for p in arena.path.glob("slot-*")) == ["slot-0", "slot-1"]
    assert (arena.slots[1] / "model.pt").exists()


def test_an_image_of_another_size_is_a_new_file_and_the_old_stays_mapped(arena: Arena):
    arena.make_slots(2)
    slot = arena.slots[0]
    arena.reserve(slot, "model.pt", 8192)
    held = os.open(slot / "model.pt", os.O_RDWR)
    os.pwrite(held, b"old", 0)
    arena.reserve(slot, "model.pt", 8192)
    assert (slot / "model.pt").read_bytes()[:3] == b"old"
    arena.reserve(slot, "model.pt", 4096)
    assert (slot / "model.pt").stat().st_size == 4096
    assert os.fstat(held).st_size == 8192 and os.pread(held, 3, 0) == b"old"
    os.close(held)
    assert [p.name for p in slot.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("size", [1 << 20, 6 << 20, (8 << 20) + 100, 13 << 20])
def test_an_image_that_was_begun_in_another_size_is_reserved_in_full(arena, size):
    arena.make_slots(1)
    slot = arena.slots[0]
    arena.begin(slot, "model.pt", 8 << 20, threading.Event())
    assert (arena.begun_bytes(), images_in(slot)) == (8 << 20, {})
    arena.reserve(slot, "model.pt", size)
    status = (slot / "model.pt").stat()
    assert status.st_size == size <= status.st_blocks * 512 < size + 4096
    assert (slot / "model.pt").read_bytes() == bytes(size)
    assert arena.begun_bytes() == 0 and names_in(slot) == ["model.pt"]


def test_what_others_have_left_where_an_image_is_begun_is_not_used(arena):
    """Only what this owner has begun is known to have nothing in it."""
    arena.make_slots(1)
    slot = arena.slots[0]
    (slot / ".begun-model.pt").write_bytes(b"anything" * 1000)
    arena.reserve(slot, "model.pt", 8192)
    assert (slot / "model.pt").read_bytes() == bytes(8192)
    arena.begin(slot, "other.pt", 8192, threading.Event())
    (slot / ".begun-other.pt").unlink()
    (slot / ".begun-other.pt").symlink_to(slot / "model.pt")
    arena.reserve(slot, "other.pt", 4096)
    assert images_in(slot) == {"model.pt": 8192, "other.pt": 4096}


def test_what_a_dead_owner_has_begun_is_removed_by_its_successor(path: Path):
    """Nobody would count its memory as free."""
    first = Arena.open(path, "/checkpoints")
    first.make_slots(2)
    first.begin(first.slots[1], "parts/model.pt", 4 << 20, threading.Event())
    first.reserve(first.slots[1], "kept.pt", 8192)
    first.release()
    second = Arena.open(path, "/checkpoints")
    assert [path.name for path in (second.slots[1] / "parts").iterdir()] == []
    assert images_in(second.slots[1]) == {"kept.pt": 8192}
    second.remove()


def test_an_image_that_was_begun_can_be_abandoned(arena):
    arena.make_slots(1)
    slot = arena.slots[0]
    for name in ("model.pt", "step-1/rank.pt"):
        arena.begin(slot, name, 2 << 20, threading.Event())
    assert (arena.begun_bytes(), sorted(arena.begun_in(slot))) == (4 << 20, ["model.pt", "step-1/rank.pt"])
    arena.abandon(slot, ["step-1/rank.pt"])
    assert (arena.begun_bytes(), arena.begun_in(slot), names_in(slot)) == (2 << 20, ["model.pt"], [".begun-model.pt"])
    arena.abandon(slot, ["model.pt"])
    assert (arena.begun_bytes(), arena.begun_in(slot), names_in(slot)) == (0, [], [])


def test_an_image_without_memory_for_it_is_an_error_and_leaves_no_file(small_tmpfs):
    shm = small_tmpfs(64)
    arena = Arena.open(arena_path(str(shm), "/checkpoints", 0), "/checkpoints")
    arena.make_slots(2)
    with pytest.raises(ArenaTooSmall, match=r"100\.0 MiB.*--shm-size.*--fast-shm-dir"):
        arena.reserve(arena.slots[0], "model.pt", 100 << 20)
    assert list(arena.slots[0].iterdir()) == []
    arena.reserve(arena.slots[0], "model.pt", 50 << 20)
    arena.remove()


def test_a_forked_child_that_outlives_its_owner_does_not_hold_the_arena(path: Path):
    program = f"""
import os, pathlib, signal, time
from fastckpt._core.memory.arena import Arena
from fastckpt._core.memory.presence import Presence
path = pathlib.Path({str(path)!r})
arena = Arena.open(path, "/checkpoints")
presence = Presence(path)
child = os.fork()
if child == 0:
    time.sleep(120)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(owner.stdout.readline())
    owner.wait(60)
    owner.stdout.close()
    try:
        arena = Arena.open(path, "/checkpoints")
        assert arena.evict_writers(5)
        arena.remove()
    finally:
        os.kill(child, signal.SIGKILL)
