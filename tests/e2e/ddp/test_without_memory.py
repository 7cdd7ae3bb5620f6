"""Arenas in files on a disk: their place, their limits, and launches with memory beside them."""

import os
import signal
import subprocess

import pytest

from fastckpt.ddp import StorageType
from fastckpt.errors import ArenaTooSmall, ConfigError, NoLoadableCheckpoint
from tests.e2e.ddp.conftest import run_script, state

MEBI = 1 << 18
"""Floats in a MiB."""
WITHOUT_MEMORY = {"FASTCKPT_MEMORY": "off", "FASTCKPT_SHM_DIR": "/dev/shm"}
KILLED = """
import os, signal, sys
from fastckpt.ddp import DdpCheckpointer, StorageType
checkpointer = DdpCheckpointer(sys.argv[1])
checkpointer.load_checkpoint()
if "stored" in sys.argv:
    checkpointer.save_checkpoint(5, {"step": 5}, storage_type=StorageType.DISK)
    checkpointer.wait_latest_checkpoint(60)
checkpointer.save_checkpoint(7, {"step": 7})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WITHOUT_MEMORY.items():
        monkeypatch.setenv(name, value)


def test_a_disk_that_is_too_small_for_the_arena_is_refused_with_size_and_limit(
    small_disk, without_memory, ranks, monkeypatch
):
    disk = small_disk(64)
    monkeypatch.setenv("TMPDIR", str(disk))
    (one,) = ranks.start()
    says = rf"^the disk cannot hold 2 x 40\.1 MiB, 80\.\d MiB in all: the disk under {disk}.*--fast-shm-dir"
    with pytest.raises(ArenaTooSmall, match=says):
        one.save_checkpoint(1, state(1, 40 * MEBI), storage_type=StorageType.MEMORY)
    with pytest.raises(ArenaTooSmall, match=says):
        one.prepare(state(1, 40 * MEBI))
    for step in range(1, 6):  # and one that just fits never ends a process, as a mapping of a full disk would
        assert one.save_checkpoint(step, state(step, 20 * MEBI), storage_type=StorageType.MEMORY)
        assert float(one.load_checkpoint()["weights"].sum()) == step * 20 * MEBI
    ranks.end()


def test_a_tmpfs_or_a_missing_directory_for_arenas_without_memory_is_refused(ranks, monkeypatch):
    monkeypatch.setenv("FASTCKPT_MEMORY", "off")
    with pytest.raises(ConfigError, match="is a tmpfs, which is memory"):
        ranks.start()
    ranks.end()
    monkeypatch.setenv("FASTCKPT_SHM_DIR", "/nowhere")
    with pytest.raises(ConfigError, match="under /nowhere: No such file or directory"):
        ranks.start()


def test_a_read_only_directory_for_arenas_is_refused(small_tmpfs, ranks):
    subprocess.run(["mount", "-o", "remount,ro", str(small_tmpfs(64))], check=True)
    with pytest.raises(ConfigError, match=r"it cannot be written to\. Name another with --fast-shm-dir"):
        ranks.start()


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_launch_with_memory_tells_of_newer_arenas_on_a_disk(
    tmp_path, ranks, monkeypatch, said, forked_launchers, is_stored
):
    """That is no fresh start. A launch without memory resumes them."""
    arguments = (str(ranks.directory), *["stored"] * is_stored)
    run_script(KILLED, tmp_path, *arguments, expected=-signal.SIGKILL, **WITHOUT_MEMORY)
    (one,) = ranks.start()
    remedy = f"launch once with --fast-memory --fast-shm-dir {os.environ['TMPDIR']}"
    if is_stored:
        assert one.load_checkpoint()["step"] == 5
        assert "step 7 of history 1 in" in said.text and f"{remedy} to resume it" in said.text
    else:
        with pytest.raises(NoLoadableCheckpoint, match=f"step 7 of history 1 in .* {remedy}"):
            one.load_checkpoint()
    ranks.end()
    for name, value in WITHOUT_MEMORY.items():
        monkeypatch.setenv(name, value)
    (one,) = ranks.start()
    assert one.load_checkpoint()["step"] == 7
    assert one.loaded_from == "memory"
