"""One directory opened again, one step persisted twice, and children of the process that saves."""

import datetime
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.in_process_saver import stop_own_saver
from fastckpt.errors import AgentLost, FastckptError, NotLoadable


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def test_a_checkpointer_opened_again_writes_a_history_of_its_own(tmp_path: Path) -> None:
    for value, step in ((1.0, 5), (2.0, 5), (3.0, 3)):
        with DdpCheckpointer(tmp_path) as checkpointer:
            assert checkpointer.save_checkpoint(step, weights(value), storage_type=StorageType.MEMORY)
            assert checkpointer.save_checkpoint(step + 1, weights(value + 0.5), storage_type=StorageType.MEMORY)
            loaded = checkpointer.load_checkpoint()
            assert checkpointer.loaded_step == step + 1
            assert loaded["w"][0] == value + 0.5


def test_a_second_checkpointer_of_one_directory_is_refused(tmp_path: Path) -> None:
    with DdpCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(FastckptError, match="close that one first"):
            DdpCheckpointer(tmp_path)
        assert checkpointer.save_checkpoint(1, weights(1), storage_type=StorageType.MEMORY)
        assert checkpointer.load_checkpoint()["w"][0] == 1


def test_a_step_saved_to_several_paths_is_at_each_of_them(tmp_path: Path) -> None:
    with DdpCheckpointer(tmp_path) as checkpointer:
        for name in ("", "latest.pt", "best.pt", "best.pt"):
            path = tmp_path / name if name else ""
            assert checkpointer.save_checkpoint(1, weights(1), path, StorageType.DISK)
        assert checkpointer.wait_latest_checkpoint(60) == 1
        assert checkpointer.save_checkpoint(1, weights(1), tmp_path / "late.pt", StorageType.DISK)
        assert checkpointer.wait_latest_checkpoint(60) == 1
    for name in ("checkpoint-1/model.pt", "latest.pt", "best.pt", "late.pt"):
        assert torch.load(tmp_path / name)["w"][0] == 1, name


def test_a_value_that_would_not_load_is_refused_after_any_number_of_saves(tmp_path: Path) -> None:
    with DdpCheckpointer(tmp_path) as checkpointer:
        for step in range(20):
            opaque = {"blob": bytes(8), "w": torch.ones(3)}
            assert checkpointer.save_checkpoint(
                2 * step, opaque | {"note": "x" * step}, storage_type=StorageType.MEMORY
            )
            with pytest.raises(NotLoadable, match="note"):
                checkpointer.save_checkpoint(
                    2 * step + 1, opaque | {"note": datetime.date(2020, 1, 1)}, storage_type=StorageType.MEMORY
                )


def test_a_promotion_without_a_launcher_does_not_end_training(tmp_path: Path) -> None:
    checkpointer = DdpCheckpointer(tmp_path)
    assert checkpointer.save_checkpoint(1, weights(1), storage_type=StorageType.MEMORY)
    link = checkpointer._writer.link
    link._channel.close()
    result = checkpointer.save_checkpoint(1, weights(1), storage_type=StorageType.DISK)
    assert result.saved
    assert "the process that keeps the checkpoints in memory" in result.trouble
    with pytest.raises(AgentLost):
        checkpointer.wait_latest_checkpoint(1)
    checkpointer.close()
    stop_own_saver()  # it did not hear of the end either


PROGRAM = """
import multiprocessing, sys, torch
from fastckpt import DdpCheckpointer
checkpointer = DdpCheckpointer(sys.argv[1])
checkpointer.save_checkpoint(1, {"w": torch.ones(3)})
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join(60)
print("exit code", child.exitcode)
"""


def test_forked_children_of_a_saving_process_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "exit code 0" in done.stdout
    assert (tmp_path / "checkpoint-1").is_dir()
