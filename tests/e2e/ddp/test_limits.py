"""States that an arena in memory or on a disk cannot hold: an error before anything is written, never a signal."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastckpt import DdpCheckpointer
from fastckpt._core.memory.presence import evict, signed
from fastckpt._core.memory.processes import Process
from fastckpt._core.storage.local.identity import identity
from fastckpt.ddp import SaveResult, StorageType
from fastckpt.errors import ArenaTooSmall, ConfigError, NoLoadableCheckpoint
from tests.e2e.ddp.conftest import Ranks, run_script, state
from tests.support.live_folders import remove_live

MEBI = 1 << 18
"""Floats in a MiB."""
Limited = Callable[[int], DdpCheckpointer]


@pytest.fixture
def limited(small_tmpfs: Callable[[int], Path], ranks: Ranks) -> Iterator[Limited]:
    """A checkpointer whose memory has so many MiB."""

    def start(size: int) -> DdpCheckpointer:
        small_tmpfs(size)
        return ranks.start()[0]

    yield start
    ranks.end()


def save(one: DdpCheckpointer, step: int, size: float) -> SaveResult:
    """Save a state of so many MiB to memory."""
    return one.save_checkpoint(step, state(step, int(size * MEBI)), storage_type=StorageType.MEMORY)


def test_too_large_a_state_is_refused_at_the_first_save_and_by_prepare(limited):
    one = limited(75)
    for act in (lambda: save(one, 1, 50), lambda: save(one, 1, 50), lambda: one.prepare(state(1, 50 * MEBI))):
        with pytest.raises(ArenaTooSmall) as refused:
            act()
        shm = one._writer.link.arena.parent
        assert str(refused.value) == (
            f"shared memory cannot hold 2 x 50.1 MiB, 100.1 MiB in all: {shm} has 71.2 MiB free of 75.0 MiB. "
            "Enlarge it (docker: --shm-size=128m; Kubernetes: emptyDir: {medium: Memory, sizeLimit: 128Mi} "
            f"mounted at {shm}), name another tmpfs with --fast-shm-dir, or keep checkpoints in files on a disk with "
            "--fast-no-memory (without fastckpt-run: FASTCKPT_MEMORY=off). (FC-001, docs/errors.md#fc-001)"
        )
        assert refused.value.code == "FC-001"
    one.prepare(state(1, 5 * MEBI))
    assert save(one, 2, 5)
    assert one.load_checkpoint()["step"] == 2


def test_memory_with_room_for_two_slots_has_two(limited, said):
    one = limited(70)
    for step in range(1, 6):
        assert save(one, step, 25)
    assert len(list(one._writer.link.arena.glob("slot-*"))) == 2
    assert "two slots only" in said.text
    assert float(one.load_checkpoint()["weights"].sum()) == 5 * 25 * MEBI
    assert one.save_checkpoint(6, state(6, 25 * MEBI), storage_type=StorageType.DISK)
    assert one.wait_latest_checkpoint(60) == 6


def test_a_state_that_outgrows_memory_is_skipped_and_the_one_before_stays(limited):
    one = limited(160)
    for step in (1, 2, 3, 4):
        assert save(one, step, 20)
    for step in (5, 6):
        result = save(one, step, 120)
        assert not result and "2 x 120.1 MiB" in result.reason and "--shm-size" in result.reason
    assert result.skipped == 2
    assert one.load_checkpoint()["step"] == 4
    assert save(one, 7, 20)
    assert one.load_checkpoint()["step"] == 7


@pytest.mark.parametrize(
    ("room", "sizes"),
    [
        (135, (15, 25, 10, 30, 30, 30, 5, 33, 33, 33)),  # into the last free memory
        (40, (10.5,) * 4 + (11.4,) * 5),  # slightly, in scarce memory
    ],
)
def test_a_state_that_grows_is_saved(limited, room, sizes):
    """Images that are replaced give their memory back, although writers have mapped them."""
    one = limited(room)
    for step, size in enumerate(sizes, 1):
        assert save(one, step, size), (step, size)
        assert float(one.load_checkpoint()["weights"][-1]) == step


def test_a_removed_arena_is_created_again_at_the_next_save(tmp_path):
    with DdpCheckpointer(tmp_path) as checkpointer:
        for step in range(9):
            assert save(checkpointer, step, 1)
            if step == 3:
                remove_live(checkpointer._writer.link.arena)
        assert checkpointer.load_checkpoint()["weights"][-1] == 8
        assert checkpointer.loaded_from == "memory"
        arena = checkpointer._writer.link.arena
        assert json.loads((arena / "owner").read_text())["directory"] == str(tmp_path)
        assert (arena / "identity").read_text() == identity(tmp_path) != "", "a later launch can adopt it"
        assert [process for _, process in signed(arena)] == [Process.current()]
        assert not evict(arena, 0), "it knows of its writer"


# --- arenas in files on a disk

WITHOUT_MEMORY = {"FASTCKPT_MEMORY": "off", "FASTCKPT_SHM_DIR": "/dev/shm"}
KILLED = """
import os, signal, sys
from fastckpt.ddp import DdpCheckpointer, StorageType
checkpointer = DdpCheckpointer(sys.argv[1])
checkpointer.load_checkpoint()
checkpointer.save_checkpoint(5, {"step": 5}, storage_type=StorageType.DISK)
checkpointer.wait_latest_checkpoint(60)
checkpointer.save_checkpoint(7, {"step": 7})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_disk_that_is_too_small_for_the_arena_is_refused_with_size_and_limit(small_disk, ranks, monkeypatch):
    for name, value in (WITHOUT_MEMORY | {"TMPDIR": str(disk := small_disk(64))}).items():
        monkeypatch.setenv(name, value)
    (one,) = ranks.start()
    says = rf"^the disk cannot hold 2 x 40\.1 MiB, 80\.\d MiB in all: the disk under {disk}.*--fast-shm-dir"
    for act in (lambda: save(one, 1, 40), lambda: one.prepare(state(1, 40 * MEBI))):
        with pytest.raises(ArenaTooSmall, match=says):
            act()
    for step in range(1, 6):  # and one that just fits never ends a process, as a mapping of a full disk would
        assert save(one, step, 20)
        assert float(one.load_checkpoint()["weights"].sum()) == step * 20 * MEBI
    ranks.end()


def test_a_tmpfs_or_a_missing_directory_for_arenas_without_memory_is_refused(small_tmpfs, ranks, monkeypatch):
    monkeypatch.setenv("FASTCKPT_MEMORY", "off")
    for shm, says in ((None, "is a tmpfs, which is memory"), ("/nowhere", "under /nowhere: No such file or directory")):
        monkeypatch.setenv("FASTCKPT_SHM_DIR", shm or os.environ["FASTCKPT_SHM_DIR"])
        with pytest.raises(ConfigError, match=says):
            ranks.start()
        ranks.end()
    monkeypatch.delenv("FASTCKPT_MEMORY")
    subprocess.run(["mount", "-o", "remount,ro", str(small_tmpfs(64))], check=True)
    with pytest.raises(ConfigError, match=r"it cannot be written to\. Name another with --fast-shm-dir"):
        ranks.start()


def test_a_launch_with_memory_tells_of_newer_arenas_on_a_disk(tmp_path, ranks, monkeypatch, said, forked_launchers):
    """That is no fresh start. A launch without memory resumes them."""
    run_script(KILLED, tmp_path, str(ranks.directory), expected=-signal.SIGKILL, **WITHOUT_MEMORY)
    (one,) = ranks.start()
    remedy = f"launch once with --fast-memory --fast-shm-dir {os.environ['TMPDIR']}"
    assert one.load_checkpoint()["step"] == 5
    assert "step 7 of history 1 in" in said.text and f"{remedy} to resume it" in said.text
    ranks.end()
    shutil.rmtree(ranks.directory / "checkpoint-5")
    (one,) = ranks.start()
    with pytest.raises(NoLoadableCheckpoint, match=f"step 7 of history 1 in .* {remedy}"):
        one.load_checkpoint()
    ranks.end()
    for name, value in WITHOUT_MEMORY.items():
        monkeypatch.setenv(name, value)
    (one,) = ranks.start()
    assert one.load_checkpoint()["step"] == 7
    assert one.loaded_from == "memory"
