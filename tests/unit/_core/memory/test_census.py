"""Contents of shared memory as the census finds them, and their removal."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import Arena
from fastckpt._core.memory.census import ArenaEntry, ArenaState, census, clean, sweep
from fastckpt._core.memory.presence import Presence
from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.telemetry import BLOCKS, LINE, TelemetryBlock, remove_dead, telemetry_name, unlink
from fastckpt.errors import ArenaInUse, FastckptError
from tests.unit._core.memory.conftest import killed

SAVE = SaveId(2, 7)


def commit(slot: Path, size: int = 8192) -> None:
    slots.begin(slot, slots.SlotBegin(SAVE, frozenset({0})))
    (slot / "model.pt").write_bytes(bytes(size))
    slots.commit(slot, 0, slots.SlotDone(SAVE, {"model.pt": size}))


def leave(path: Path, *, holding: bool) -> None:
    arena = Arena.open(path, "/checkpoints")
    arena.make_slots(2)
    arena.claim_for("mark")
    if holding:
        commit(arena.slots[1])
    arena.release()


def of_boot(path: Path, boot: str) -> None:
    owner = json.loads((path / "owner").read_text())
    (path / "owner").write_text(json.dumps(owner | {"boot": boot}))


def found(shm: Path) -> ArenaEntry:
    (entry,) = census(shm)
    return entry


def test_an_arena_that_came_into_use_after_the_census_is_not_removed_and_its_checkpoint_only_by_force(shm, path):
    """An owner, or a writer alone, that came after the look."""
    assert census(shm) == []
    leave(path, holding=False)
    entry = found(shm)
    owner = Arena.open(path, "/checkpoints")
    commit(owner.slots[0])
    used = found(shm)
    assert (used.path, used.uid, used.directory, used.claim.seen) == (path, os.getuid(), "/checkpoints", "mark")
    assert (used.state, used.owner, used.is_arena) == (ArenaState.IN_USE, Process.current(), True)
    assert used.slots == {"slot-0": SAVE, "slot-1": None} and 8192 <= used.size <= 8192 + 20 * 4096
    slots.clear(owner.slots[0])
    with pytest.raises(ArenaInUse, match="in use"):
        clean(entry, force=True)
    owner.release()
    writer = Presence(path)
    assert found(shm).state is ArenaState.IN_USE and found(shm).writers == (Process.current(),)
    with pytest.raises(ArenaInUse, match="in use"):
        clean(entry, force=True)
    writer.close()
    leave(path, holding=True)
    with pytest.raises(ArenaInUse, match="was used since"):
        clean(entry, force=True)
    with pytest.raises(FastckptError, match=r"holds step 7 of history 2 of /checkpoints"):
        clean(found(shm))
    assert found(shm).newest == SAVE
    clean(found(shm), force=True)
    assert list(shm.iterdir()) == []
    leave(path, holding=True)
    (path / "slot-1" / "model.pt").unlink()
    assert (found(shm).state, found(shm).newest) == (ArenaState.LEFT_BEHIND, None)
    clean(found(shm))
    assert list(shm.iterdir()) == []


def test_a_telemetry_block_is_a_part_of_its_arena_and_a_stray_one_is_removed_unless_in_use(shm, path, monkeypatch):
    killed(lambda: (Arena.open(path, "/checkpoints"), TelemetryBlock(telemetry_name(path), 2)))
    entry = found(shm)
    assert entry.state is ArenaState.LEFT_BEHIND and entry.owner is not None and not entry.owner.is_alive()
    file = BLOCKS / telemetry_name(path).strip("/")
    clean(entry)
    assert not file.exists() and census(shm) == []
    block = TelemetryBlock(telemetry_name(path), 2)
    stray = found(shm)
    assert (stray.path, stray.state, stray.is_arena) == (file, ArenaState.IN_USE, False)
    assert stray.size == -(-2 * LINE // 4096) * 4096
    with pytest.raises(ArenaInUse):
        clean(stray)
    block.close()
    assert found(shm).state is ArenaState.LEFT_BEHIND
    clean(found(shm))
    assert census(shm) == []
    monkeypatch.setattr("fastckpt._core.memory.census.names_in", lambda _: [file.name])
    assert census(shm) == [], "it disappears during the census"


@pytest.mark.parametrize("what", ["link", "file", "open to others", "of another user"])
def test_files_not_made_by_fastckpt_or_of_others_are_foreign_even_to_root(shm, path, tmp_path, what: str):
    if what == "link":
        leave(tmp_path / "elsewhere", holding=False)
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "file":
        path.write_text("x")
    else:
        leave(path, holding=False)
        path.chmod(0o755) if what == "open to others" else os.chown(path, 65534, 65534)
    assert found(shm).state is ArenaState.FOREIGN
    assert found(shm).uid == (65534 if what == "of another user" else os.getuid())
    with pytest.raises(ArenaInUse, match="foreign"):
        clean(found(shm), force=True)
    assert path.lstat()
    path.chmod(0o700) if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_sweep_removes_what_is_of_an_earlier_boot_or_half_removed_and_in_use_by_nobody(shm: Path, path: Path):
    leave(path, holding=True)
    sweep(shm)
    owner = (path / "owner").read_text()
    (path / "owner").write_text("{}")
    sweep(shm)
    assert found(shm).newest == SAVE
    (path / "owner").write_text(owner)
    of_boot(path, "an earlier one")
    arena = Arena.open(path, "/checkpoints")
    assert [slots.read(slot).committed for slot in arena.slots] == [None, None]
    of_boot(path, "an earlier one")
    writer = Presence(path)
    for user in (arena.release, writer.close):
        sweep(shm)
        assert found(shm).state is ArenaState.IN_USE
        user()
    assert found(shm).state is ArenaState.OLD_BOOT
    sweep(shm)
    assert census(shm) == []
    leave(path, holding=True)
    path.rename(path.with_name(f"{path.name}.removed-01234567"))
    sweep(shm)
    assert [*shm.iterdir()] == []


def test_a_sweep_removes_blocks_of_the_dead_whatever_place_they_had_and_of_nobody_else(shm: Path):
    def block(place: str) -> str:
        return telemetry_name(shm / place / f"fastckpt-{os.getuid()}-0123456789abcdef")

    dead, long, alive, other, foreign = map(block, ("dead", "long" * 60, "alive", "other", "foreign"))
    for name in (dead, long):
        killed(partial(TelemetryBlock, name, 1))
    living = TelemetryBlock(alive, 1)
    unlike = BLOCKS / f"{other.strip('/')}.mine"  # not a name of ours
    theirs = BLOCKS / foreign.strip("/")
    for path in (unlike, theirs):
        path.touch()
    if not os.getuid():
        os.chown(theirs, 65534, 65534)
    try:
        assert (BLOCKS / alive.strip("/")).exists()  # those of the dead may have been swept by another test's agent
        sweep(shm)
        assert not any((BLOCKS / name.strip("/")).exists() for name in (dead, long))
        assert (BLOCKS / alive.strip("/")).exists() and unlike.exists()
        assert theirs.exists() or os.getuid()
    finally:
        living.close()
        for name in (dead, long, alive):
            unlink(name)
        unlike.unlink()
        theirs.unlink(missing_ok=True)


def test_a_block_that_is_made_while_launches_sweep_is_there(shm: Path):
    name = telemetry_name(shm / "own" / f"fastckpt-{os.getuid()}-0123456789abcdef")
    ends = threading.Event()

    def keep_sweeping() -> None:
        while not ends.is_set():
            remove_dead(BLOCKS / name.strip("/"))

    with ThreadPoolExecutor(2) as pool:
        sweepers = [pool.submit(keep_sweeping) for _ in range(2)]
        try:
            for _ in range(300):
                block = TelemetryBlock(name, 1)
                TelemetryBlock(name).close()  # as a worker finds it
                block.close()
        finally:
            ends.set()
        assert [each.result() for each in sweepers] == [None, None]
    unlink(name)
