"""A disk that is full: training goes on, memory stays new, and storage catches up once there is space again."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from tests.e2e.ddp.conftest import until


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; skips where mounting is not permitted."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_save_requested_during_a_successful_retry_is_persisted(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, steps = Event(), Event(), count(1)

    def held(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        begun.set()
        assert go_on.wait(60)
        sync(descriptor)

    with DdpCheckpointer(disk / "checkpoints") as checkpointer:
        save = partial(checkpointer.save_checkpoint, state_dict={"w": torch.zeros(200_000)})
        (ballast := disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 16)))
        assert save(next(steps), storage_type=StorageType.DISK)
        until(lambda: save(next(steps)).trouble, "trouble")
        monkeypatch.setattr(os, "fsync", held)
        monkeypatch.setattr(os, "fdatasync", held)
        ballast.unlink()
        assert begun.wait(60)
        assert save(asked := next(steps), storage_type=StorageType.DISK)
        go_on.set()
        assert checkpointer.wait_latest_checkpoint(60) == asked
