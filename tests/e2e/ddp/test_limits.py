"""States that shared memory cannot hold: an error before anything is written, never a signal."""

import shutil
from pathlib import Path

import pytest
import torch

from fastckpt.ddp import StorageType
from fastckpt.errors import ArenaTooSmall
from tests.e2e.ddp.conftest import Ranks, state

MEBI = 1 << 18
"""Floats in a MiB."""


@pytest.fixture(autouse=True)
def ends_before_the_tmpfs_goes(small_tmpfs, ranks: Ranks):
    yield
    ranks.end()


def test_too_large_a_state_is_refused_at_the_first_save(small_tmpfs, ranks: Ranks):
    shm = small_tmpfs(150)
    (one,) = ranks.start()
    for _ in range(2):
        with pytest.raises(ArenaTooSmall) as refused:
            one.save_checkpoint(1, state(1, 100 * MEBI), storage_type=StorageType.MEMORY)
        assert str(refused.value) == (
            f"shared memory cannot hold 2 x 100.1 MiB, 200.1 MiB in all: {shm} has 142.5 MiB free of 150.0 MiB. "
            "Enlarge it (docker: --shm-size=256m; Kubernetes: emptyDir: {medium: Memory, sizeLimit: 256Mi} "
            f"mounted at {shm}), name another tmpfs with --fast-shm-dir, or keep checkpoints in files on a disk with "
            "--fast-no-memory (without fastckpt-run: FASTCKPT_MEMORY=off). (FC-001, docs/errors.md#fc-001)"
        )
        assert refused.value.code == "FC-001"
    assert one.save_checkpoint(2, state(2, 10 * MEBI), storage_type=StorageType.MEMORY)
    assert one.load_checkpoint()["step"] == 2


def test_prepare_refuses_a_state_that_is_too_large(small_tmpfs, ranks: Ranks):
    small_tmpfs(150)
    (one,) = ranks.start()
    with pytest.raises(ArenaTooSmall, match=r"100\.1 MiB"):
        one.prepare(state(1, 100 * MEBI))
    one.prepare(state(1, 10 * MEBI))
    assert one.save_checkpoint(1, state(1, 10 * MEBI), storage_type=StorageType.MEMORY)


def test_memory_with_room_for_two_slots_has_two(small_tmpfs, ranks: Ranks, said):
    small_tmpfs(280)
    (one,) = ranks.start()
    for step in range(1, 6):
        assert one.save_checkpoint(step, state(step, 100 * MEBI), storage_type=StorageType.MEMORY)
    assert len(list(one._writer.link.arena.glob("slot-*"))) == 2
    assert "two slots only" in said.text
    assert float(one.load_checkpoint()["weights"].sum()) == 5 * 100 * MEBI
    assert one.save_checkpoint(6, state(6, 100 * MEBI), storage_type=StorageType.DISK)
    assert one.wait_latest_checkpoint(60) == 6


def test_a_state_that_outgrows_memory_is_skipped_and_the_one_before_stays(small_tmpfs, ranks: Ranks):
    small_tmpfs(160)
    (one,) = ranks.start()
    for step in (1, 2, 3, 4):
        assert one.save_checkpoint(step, state(step, 20 * MEBI), storage_type=StorageType.MEMORY)
    for step in (5, 6):
        result = one.save_checkpoint(step, state(step, 120 * MEBI), storage_type=StorageType.MEMORY)
        assert not result and "2 x 120.1 MiB" in result.reason and "--shm-size" in result.reason
    assert result.skipped == 2
    assert one.load_checkpoint()["step"] == 4
    assert one.save_checkpoint(7, state(7, 20 * MEBI), storage_type=StorageType.MEMORY)
    assert one.load_checkpoint()["step"] == 7


def test_a_slot_that_grows_into_the_last_free_memory_is_saved(small_tmpfs, ranks: Ranks):
    """Images that are replaced give their memory back, although writers have mapped them."""
    small_tmpfs(270)
    (one,) = ranks.start()
    for step, size in enumerate((30, 50, 20, 60, 60, 60, 10, 66, 66, 66), 1):
        assert one.save_checkpoint(step, state(step, size * MEBI), storage_type=StorageType.MEMORY), (step, size)
        assert float(one.load_checkpoint()["weights"][-1]) == step


def test_the_shared_memory_that_docker_gives_by_default_holds_a_small_state(small_tmpfs, ranks: Ranks):
    small_tmpfs(64)
    (one,) = ranks.start()
    assert one.save_checkpoint(1, {"weights": torch.zeros(MEBI)}, storage_type=StorageType.MEMORY)


def test_a_third_slot_leaves_room_for_data_loaders_or_a_warning_says_so(small_tmpfs, ranks: Ranks, said):
    """A third slot of 16 MiB would fit into docker's 64; the workers of a loader would find no room then, and die."""
    shm = small_tmpfs(64)
    (one,) = ranks.start()
    for step in range(1, 6):
        assert one.save_checkpoint(step, state(step, 15 * MEBI), storage_type=StorageType.MEMORY)
    assert shutil.disk_usage(shm).free > 32 << 20
    assert "two slots only" in said.text and "data loaders" not in said.text
    for step in range(6, 11):
        assert one.save_checkpoint(step, state(step, 17 * MEBI), storage_type=StorageType.MEMORY)
    assert said.text.count(f"checkpoints take 34.1 MiB of 64.0 MiB in {shm}: data loaders with workers") == 1
    assert "fail. Enlarge it (docker: --shm-size=128m;" in said.text
    assert one.load_checkpoint()["step"] == 10


def test_memory_taken_by_others_after_the_first_save_is_reported(small_tmpfs, ranks: Ranks, request):
    shm = small_tmpfs(300)
    (one,) = ranks.start()
    assert one.save_checkpoint(1, state(1, 20 * MEBI), storage_type=StorageType.MEMORY)
    other = Path(shm) / "owner-unknown"
    request.addfinalizer(lambda: other.unlink(missing_ok=True))
    with other.open("wb") as file:
        try:
            while file.write(bytes(1 << 20)):
                file.flush()
        except OSError:
            pass
    results = [
        one.save_checkpoint(step, state(step, size * MEBI), storage_type=StorageType.MEMORY)
        for step, size in enumerate((20, 20, 20, 50), 2)
    ]
    told = [result.reason for result in results if not result.saved]
    assert all("No space left" in text or "MiB" in text for text in told) and told
    assert one.load_checkpoint()["step"] >= 1
    other.unlink()
    assert one.save_checkpoint(7, state(7, 50 * MEBI), storage_type=StorageType.MEMORY)
