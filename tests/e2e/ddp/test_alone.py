"""Without a launcher of ours the first local rank has the saver."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import DdpCheckpointer, StorageType
from tests.e2e.ddp.conftest import Ranks, state

ROOT = Path(__file__).parents[3]


def on_storage(directory: Path) -> list[int]:
    return sorted(stored.id.step for stored in CheckpointDirectory(directory).checkpoints())


def no_arena() -> bool:
    return not any(Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir())


def test_a_script_without_a_launcher_saves_loads_and_warns_once(directory: Path, said):
    with DdpCheckpointer(directory) as one, DdpCheckpointer(directory.with_name("other")) as other:
        assert one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY) and other.save_checkpoint(
            5, state(5), storage_type=StorageType.MEMORY
        )
        assert one.load_checkpoint()["step"] == 1 and one.loaded_from == "memory"
    assert said.text.count("not started by fastckpt-run") == 1


def test_close_without_a_launcher_waits_for_the_last_flush(directory: Path):
    with DdpCheckpointer(directory) as one:
        one.save_checkpoint(1, state(1), storage_type=StorageType.DISK)
        one.save_checkpoint(2, state(2), storage_type=StorageType.MEMORY)
    assert on_storage(directory)[-1] == 2
    assert no_arena()
    with DdpCheckpointer(directory) as one:
        assert one.load_checkpoint()["step"] == 2 and one.loaded_from == "storage"


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise RuntimeError('wrong')"])
def test_a_script_without_a_launcher_that_does_not_close_flushes_at_its_end(directory: Path, end: str):
    program = f"""
import torch
from fastckpt.ddp import DdpCheckpointer
from fastckpt._core.saver import server as saver
saver.WRITERS_TIMEOUT = 600
checkpointer = DdpCheckpointer({str(directory)!r})
checkpointer.save_checkpoint(1, {{"weights": torch.ones(10)}})
{end}
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3}.get(end, 1), done.stderr
    assert on_storage(directory) == [1], done.stderr
    assert no_arena(), done.stderr


def test_a_slower_rank_finishes_its_last_save_after_the_first_rank_closed(ranks: Ranks, directory: Path, monkeypatch):
    """The first rank saves the last step and closes, while the second is about to."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    first, second = ranks.start_workers(2)
    for member in (first, second):
        assert member.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY)
    assert first.save_checkpoint(2, state(2), storage_type=StorageType.DISK)
    closing = threading.Thread(target=first.close)
    closing.start()
    time.sleep(0.3)
    result = second.save_checkpoint(2, state(2), storage_type=StorageType.DISK)
    second.close()
    closing.join(60)
    assert result.saved
    assert on_storage(directory)[-1] == 2
    assert torch.load(directory / "checkpoint-2" / "rank_1.pt", weights_only=True)
