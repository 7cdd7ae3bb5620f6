"""The persist rate limit, applied to every copy of the node."""

import time
from pathlib import Path

import pytest
import torch

from fastckpt import StorageType
from tests.e2e.ddp.conftest import Ranks

MiB = 2**20


def test_persists_keep_to_the_rate_that_was_set(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """A limit can only be too slow on a busy machine, so a bound from below always holds."""
    monkeypatch.setenv("FASTCKPT_PERSIST_MBPS", str(8 * MiB / 1e6))
    (member,) = ranks.start()
    state = {"w": torch.rand(4 * MiB // 4)}
    start = time.monotonic()
    for step in range(3):
        assert member.save_checkpoint(step, state, storage_type=StorageType.DISK)
        member.wait_latest_checkpoint(60)
    assert time.monotonic() - start > (12 - 2) / 8
    assert sorted(path.name for path in directory.glob("checkpoint-*")) == [f"checkpoint-{i}" for i in range(3)]
