"""Ownership of an arena, its state after the owner, and refusals."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import Arena
from fastckpt._core.memory.presence import Presence
from fastckpt._core.memory.records import make_folders, names_in, remove_any
from fastckpt._core.memory.slots import images_in
from fastckpt.errors import ArenaInUse, ArenaTooSmall, FastckptError
from tests.unit._core.memory.conftest import killed


@pytest.fixture
def arena(path: Path) -> Iterator[Arena]:
    arena = Arena.open(path, "/checkpoints")
    arena.make_slots(2)
    yield arena
    if arena.is_there():
        arena.remove()


@pytest.fixture
def slot(arena: Arena) -> Path:
    return arena.slots[0]


def test_images_of_an_arena_may_be_in_subdirectories_and_are_readable_by_its_user_alone(arena: Arena, slot: Path):
    assert f"-{os.getuid()}-" in arena.path.name
    sizes = {"model.pt": 4096, "optimizer_0/.metadata": 4096, "optimizer_0/__0_0.distcp": 8192}
    for name, size in sizes.items():
        arena.reserve(slot, name, size)
    assert images_in(slot) == sizes
    for path in (arena.path, *arena.path.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    arena.reserve(slot, "optimizer_0/__0_0.distcp", 12288)
    assert images_in(slot) == sizes | {"optimizer_0/__0_0.distcp": 12288}
    with pytest.raises(FileNotFoundError):  # an arena that was removed
        make_folders(slot / "arena", slot / "arena/slot-1")
    assert not (slot / "arena").exists()


def test_an_arena_in_full_memory_is_refused_with_a_remedy_and_leaves_nothing(small_tmpfs: Callable[[int], Path]):
    full = small_tmpfs(1)
    (full / "ballast").write_bytes(bytes(1 << 20))
    with pytest.raises(ArenaTooSmall, match=r"nothing can be written under .*No space left.*--shm-size"):
        Arena.open(full / "arena", "/checkpoints")
    assert [path.name for path in full.iterdir()] == ["ballast"]
    (full / "ballast").unlink()


def open_slots(path: Path, count: int) -> Arena:
    arena = Arena.open(path, "/checkpoints")
    arena.make_slots(count)
    return arena


@pytest.mark.parametrize(
    "leave", [lambda path: open_slots(path, 3).release(), lambda path: killed(lambda: open_slots(path, 3))]
)
def test_an_arena_of_an_owner_that_is_gone_is_adopted_with_its_checkpoints(path: Path, leave: Callable[[Path], None]):
    leave(path)
    (path / "slot-1/model.pt").write_bytes(b"kept")
    second = Arena.open(path, "/checkpoints")
    assert second.adopted and [slot.name for slot in second.slots] == ["slot-0", "slot-1", "slot-2"]
    assert (second.slots[1] / "model.pt").read_bytes() == b"kept"
    second.make_slots(2)
    assert len(second.slots) == 3
    second.drop(second.slots[2])
    assert [slot.name for slot in second.slots] == sorted(p.name for p in path.glob("slot-*")) == ["slot-0", "slot-1"]
    assert (second.slots[1] / "model.pt").exists()
    second.remove()
    assert not path.exists()
    again = Arena.open(path, "/checkpoints")
    assert not again.adopted
    again.remove()


def test_what_is_not_a_private_directory_of_this_user_is_refused_in_place_of_an_arena(path: Path, tmp_path: Path):
    (elsewhere := tmp_path / "elsewhere").mkdir(mode=0o700)
    for target in (elsewhere, tmp_path / "nowhere", None):
        path.touch(0o700) if target is None else path.symlink_to(target)
        with pytest.raises((FastckptError, FileExistsError)):
            Arena.open(path, "/checkpoints")
        path.unlink()
    assert list(elsewhere.iterdir()) == [] and not (tmp_path / "nowhere").exists()
    path.mkdir()
    for mode, owner in ((0o755, 0), (0o701, 0), (0o1777, 0), (0o700, 65534)):
        path.chmod(mode)
        if owner and os.getuid() == 0:
            os.chown(path, owner, owner)
        with pytest.raises(ArenaInUse, match="owner 65534" if owner else "not a private directory"):
            Arena.open(path, "/checkpoints")


def test_symbolic_links_within_an_arena_are_not_followed(path: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.mkdir(mode=0o700)
    (path / "owner").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        Arena.open(path, "/checkpoints")
    (path / "owner").unlink()
    (path / "slot-0").symlink_to(tmp_path)
    arena = open_slots(path, 2)
    for name in (".begun-model.pt", "model.pt"):
        (arena.slots[0] / name).symlink_to(victim)
    arena.reserve(arena.slots[0], "model.pt", len("precious"))
    (arena.slots[0] / "model.pt").write_text("ours")
    arena.remove()
    assert victim.read_text() == "precious" and victim.parent.is_dir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: (path / "within").mkdir(parents=True), make_socket])
def test_foreign_files_in_an_arena_are_replaced_and_block_nobody(path: Path, make: Callable[[Path], object]):
    arena = open_slots(path, 2)
    for name in ("slot-7", "slot-0/model.pt", "slot-0/.begun-model.pt", "identity"):
        make(path / name)
    owner = rf"/checkpoints is in use by another job on this host: process {os.getpid()} on .*, started 20\d\d-"
    with pytest.raises(ArenaInUse, match=owner):
        open_slots(path, 2)
    arena.release()
    arena = open_slots(path, 2)
    assert not arena.claim_for("mark") and arena.claim_for("mark")
    arena.reserve(arena.slots[0], "model.pt", 4096)
    assert (arena.slots[0] / "model.pt").stat().st_size == 4096
    arena.release()
    for name in ("owner", "writers"):
        remove_any(path / name)
        make(path / name)
        with pytest.raises(OSError):
            Presence(path) if name == "writers" else Arena.open(path, "/checkpoints")
        remove_any(path / name)


def test_concurrent_openers_of_an_arena_agree_on_one_owner(path: Path):
    """Also while former owners remove it."""
    alone = threading.Lock()

    def come(_: int) -> list[bool]:
        found = []
        for _ in range(30):
            with suppress(ArenaInUse, FileNotFoundError):
                arena = Arena.open(path, "/checkpoints")
                found.append(alone.acquire(blocking=False))
                time.sleep(0.0005)
                if found[-1]:
                    alone.release()
                arena.remove()
        return found

    with ThreadPoolExecutor(4) as pool:
        owned = [each for found in pool.map(come, range(4)) for each in found]
    assert owned and all(owned)


def test_an_image_of_another_size_is_a_new_file_and_the_old_stays_mapped(arena: Arena, slot: Path):
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


def test_an_image_that_was_begun_is_reserved_in_full_whatever_its_size_or_abandoned(arena: Arena, slot: Path):
    for size in (1 << 20, 6 << 20, (8 << 20) + 100, 13 << 20):
        arena.begin(slot, f"{size}.pt", 8 << 20, threading.Event())
        assert (arena.begun_bytes(), arena.begun_in(slot)) == (8 << 20, [f"{size}.pt"])
        arena.reserve(slot, f"{size}.pt", size)
        status = (slot / f"{size}.pt").stat()
        assert status.st_size == size <= status.st_blocks * 512 < size + 4096
        assert (slot / f"{size}.pt").read_bytes() == bytes(size)
        assert arena.begun_bytes() == 0 and names_in(slot) == [f"{size}.pt"]
        (slot / f"{size}.pt").unlink()
    for name in ("model.pt", "step-1/rank.pt"):
        arena.begin(slot, name, 2 << 20, threading.Event())
    assert (arena.begun_bytes(), sorted(arena.begun_in(slot))) == (4 << 20, ["model.pt", "step-1/rank.pt"])
    for name, left in (("step-1/rank.pt", ["model.pt"]), ("model.pt", [])):
        arena.abandon(slot, [name])
        names = [f".begun-{each}" for each in left]
        assert (arena.begun_bytes(), arena.begun_in(slot), names_in(slot)) == (len(left) * (2 << 20), left, names)


def test_what_others_have_left_where_an_image_is_begun_is_not_used(arena: Arena, slot: Path):
    """Only what this owner has begun is known to have nothing in it. That of a dead one would not count as free."""
    (slot / ".begun-model.pt").write_bytes(b"anything" * 1000)
    arena.reserve(slot, "model.pt", 8192)
    assert (slot / "model.pt").read_bytes() == bytes(8192)
    arena.begin(slot, "other.pt", 8192, threading.Event())
    (slot / ".begun-other.pt").unlink()
    (slot / ".begun-other.pt").symlink_to(slot / "model.pt")
    arena.reserve(slot, "other.pt", 4096)
    assert images_in(slot) == {"model.pt": 8192, "other.pt": 4096}
    arena.begin(slot, "parts/model.pt", 4 << 20, threading.Event())
    arena.release()
    successor = Arena.open(arena.path, "/checkpoints")
    assert [*(slot / "parts").iterdir()] == [] and images_in(slot) == {"model.pt": 8192, "other.pt": 4096}
    successor.remove()


def test_an_image_without_memory_for_it_is_an_error_and_leaves_no_file(small_tmpfs: Callable[[int], Path]):
    arena = open_slots(small_tmpfs(64) / "arena", 2)
    with pytest.raises(ArenaTooSmall, match=r"100\.0 MiB.*--shm-size.*--fast-shm-dir"):
        arena.reserve(arena.slots[0], "model.pt", 100 << 20)
    assert list(arena.slots[0].iterdir()) == []
    arena.remove()


def test_a_forked_child_that_outlives_its_owner_does_not_hold_the_arena(path: Path, tmp_path: Path):
    def own() -> None:
        held = Arena.open(path, "/checkpoints"), Presence(path)
        if (child := os.fork()) == 0:
            time.sleep(120)
            os._exit(0)
        (tmp_path / "child").write_text(str(child))
        del held

    killed(own)
    try:
        arena = Arena.open(path, "/checkpoints")
        assert arena.evict_writers(5)
        arena.remove()
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
