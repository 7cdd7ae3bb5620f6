"""States that shared memory cannot hold: an error before anything is written, never a signal."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastckpt import DdpCheckpointer
from fastckpt._core.memory.presence import evict, signed
from fastckpt._core.memory.processes import Process
from fastckpt._core.storage.local.identity import identity
from fastckpt.ddp import SaveResult, StorageType
from fastckpt.errors import ArenaTooSmall
from tests.e2e.ddp.conftest import Ranks, state
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
