"""Shared memory that gets short, or goes away, while a job runs."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.memory.presence import evict, signed
from fastckpt._core.memory.processes import Process
from fastckpt._core.storage.local.identity import identity
from tests.support.live_folders import remove_live

MEBI = 1 << 20


def state(mebibytes: float, value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((int(mebibytes * MEBI) // 4,), float(value))}


def test_a_removed_arena_is_created_again_at_the_next_save(tmp_path: Path) -> None:
    with DdpCheckpointer(tmp_path) as checkpointer:
        for step in range(4):
            assert checkpointer.save_checkpoint(step, state(1, step), storage_type=StorageType.MEMORY)
        remove_live(checkpointer._writer.link.arena)
        for step in range(4, 9):
            assert checkpointer.save_checkpoint(step, state(1, step), storage_type=StorageType.MEMORY)
        assert checkpointer.load_checkpoint()["w"][-1] == 8
        assert checkpointer.loaded_from == "memory"
        arena = checkpointer._writer.link.arena
        assert json.loads((arena / "owner").read_text())["directory"] == str(tmp_path)
        assert (arena / "identity").read_text() == identity(tmp_path) != "", "a later launch can adopt it"
        assert [process for _, process in signed(arena)] == [Process.current()]
        assert not evict(arena, 0), "it knows of its writer"


def test_a_state_that_outgrows_three_slots_is_kept_in_two(tmp_path: Path, small_tmpfs: Callable[[int], Path]) -> None:
    small_tmpfs(40)
    with DdpCheckpointer(tmp_path) as checkpointer:
        for step in range(4):
            assert checkpointer.save_checkpoint(step, state(4, step), storage_type=StorageType.MEMORY)
        for step in range(4, 9):
            assert checkpointer.save_checkpoint(step, state(14, step), storage_type=StorageType.MEMORY)
        assert checkpointer.load_checkpoint()["w"][-1] == 8


def test_a_state_that_grows_slightly_in_scarce_memory_is_saved(
    tmp_path: Path, small_tmpfs: Callable[[int], Path]
) -> None:
    small_tmpfs(40)
    with DdpCheckpointer(tmp_path) as checkpointer:
        for step in range(6):
            assert checkpointer.save_checkpoint(step, state(10.5, step), storage_type=StorageType.MEMORY)
        for step in range(6, 12):
            assert checkpointer.save_checkpoint(step, state(11.4, step), storage_type=StorageType.MEMORY)
        assert checkpointer.load_checkpoint()["w"][-1] == 11
