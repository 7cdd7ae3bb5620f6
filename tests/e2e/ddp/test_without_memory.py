"""Arenas in files on a disk: their place, their limits, and launches with memory beside them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastckpt._core.transfer.image import Image
from fastckpt.ddp import StorageType
from fastckpt.errors import ArenaTooSmall, ConfigError, NoLoadableCheckpoint
from tests.e2e.ddp.conftest import Ranks, state

MEBI = 1 << 18
"""Floats in a MiB."""
KILLED = """
import os, signal, sys, torch
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
    monkeypatch.setenv("FASTCKPT_MEMORY", "off")
    monkeypatch.setenv("FASTCKPT_SHM_DIR", "/dev/shm")


def killed(directory: Path, *arguments: str) -> None:
    """A job without memory that saves step 7, and dies."""
    variables = os.environ | {"FASTCKPT_MEMORY": "off", "FASTCKPT_SHM_DIR": "/dev/shm"}
    command = [sys.executable, "-c", KILLED, str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=variables)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_arenas_without_memory_are_in_the_temporary_directory(without_memory, ranks: Ranks):
    (one,) = ranks.start()
    assert one.save_checkpoint(1, state(1, MEBI), storage_type=StorageType.MEMORY)
    assert one._writer.link.arena.parent == Path(os.environ["TMPDIR"])
    assert one.save_checkpoint(2, state(2, MEBI), storage_type=StorageType.DISK)
    assert one.wait_latest_checkpoint(60) == 2
    assert float(one.load_checkpoint()["weights"].sum()) == 2 * MEBI


def test_a_disk_that_is_too_small_for_the_arena_is_refused_with_size_and_limit(
    small_disk, without_memory, ranks: Ranks, monkeypatch
):
    disk = small_disk(64)
    monkeypatch.setenv("TMPDIR", str(disk))
    (one,) = ranks.start()
    with pytest.raises(
        ArenaTooSmall, match=rf"^the disk cannot hold 2 x 40\.1 MiB, 80\.\d MiB in all: the disk under {disk}"
    ):
        one.save_checkpoint(1, state(1, 40 * MEBI), storage_type=StorageType.MEMORY)
    with pytest.raises(
        ArenaTooSmall, match=r"Free some of it, or name a directory on a larger disk with --fast-shm-dir\. \(FC-001, "
    ):
        one.prepare(state(1, 40 * MEBI))
    for step in range(1, 6):  # and one that just fits never ends a process, as a mapping of a full disk would
        assert one.save_checkpoint(step, state(step, 20 * MEBI), storage_type=StorageType.MEMORY)
        assert float(one.load_checkpoint()["weights"].sum()) == step * 20 * MEBI
    ranks.end()


def test_a_tmpfs_or_a_missing_directory_for_arenas_without_memory_is_refused(ranks: Ranks, monkeypatch):
    monkeypatch.setenv("FASTCKPT_MEMORY", "off")
    with pytest.raises(ConfigError, match="is a tmpfs, which is memory"):
        ranks.start()
    ranks.end()
    monkeypatch.setenv("FASTCKPT_SHM_DIR", "/nowhere")
    with pytest.raises(ConfigError, match="under /nowhere: No such file or directory"):
        ranks.start()


def test_a_read_only_directory_for_arenas_is_refused(small_tmpfs, ranks: Ranks):
    subprocess.run(["mount", "-o", "remount,ro", str(small_tmpfs(64))], check=True)
    with pytest.raises(ConfigError, match=r"it cannot be written to\. Name another with --fast-shm-dir"):
        ranks.start()


def test_images_on_a_disk_are_not_pinned_for_devices(tmp_path: Path, monkeypatch):
    asked = []
    monkeypatch.setattr("fastckpt._core.transfer.image.pin", lambda address, size, device: asked.append(size) or True)
    monkeypatch.setattr("fastckpt._core.transfer.image.unpin", lambda address, device: asked.append(-1))
    for folder, size in ((tmp_path, 1), (Path(os.environ["FASTCKPT_SHM_DIR"]), 2)):
        path = folder / "image"
        path.write_bytes(bytes(size))
        image = Image(path)
        image.pin(torch.device("cuda"))
        image.close()
        path.unlink()
    assert asked == [2, -1]


def test_a_launch_with_memory_beside_newer_arenas_on_a_disk_is_no_fresh_start(
    directory: Path, ranks: Ranks, monkeypatch
):
    killed(directory)
    (one,) = ranks.start()
    with pytest.raises(
        NoLoadableCheckpoint, match=r"step 7 of history 1 in .* launch once with --fast-memory --fast-shm-dir /tmp/"
    ):
        one.load_checkpoint()
    ranks.end()
    monkeypatch.setenv("FASTCKPT_MEMORY", "off")
    monkeypatch.setenv("FASTCKPT_SHM_DIR", "/dev/shm")
    (one,) = ranks.start()
    assert one.load_checkpoint()["step"] == 7
    assert one.loaded_from == "memory"


def test_a_launch_with_memory_reports_arenas_on_a_disk_that_it_does_not_resume(
    directory: Path, ranks: Ranks, monkeypatch, said
):
    killed(directory, "stored")
    (one,) = ranks.start()
    assert one.load_checkpoint()["step"] == 5
    assert (
        "step 7 of history 1 in" in said.text
        and f"launch once with --fast-memory --fast-shm-dir {os.environ['TMPDIR']} to resume it" in said.text
    )
    ranks.end()
    subprocess.run(["fastckpt", "shm", "clean", "--yes", "--force"], check=True, capture_output=True, env=_clean())


def _clean() -> dict[str, str]:
    folder = str(Path(sys.executable).parent)
    path = f"{folder}:{os.environ['PATH']}"
    return os.environ | {"FASTCKPT_MEMORY": "off", "FASTCKPT_SHM_DIR": "/dev/shm", "PATH": path}
