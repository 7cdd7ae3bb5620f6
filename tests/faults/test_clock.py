"""A clock of the day that jumps by hours, both ways, within a job and from one to the next: nothing is timed by it."""

import os
import time
from pathlib import Path

import pytest
import torch

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy

HOUR = 3600


def test_saves_persists_and_retention_under_a_clock_that_jumps_are_as_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From one save to the next, and from one job to the next, which began hours before the last one ended."""
    directory, right = tmp_path / "checkpoints", time.time

    def run(*jumps: int) -> tuple[int, str]:
        with DdpCheckpointer(directory, deletion_strategy=KeepLatestStepStrategy(2, directory)) as checkpointer:
            loaded = checkpointer.load_checkpoint()
            step = loaded["step"] if loaded else 0
            assert not loaded or torch.equal(loaded["weights"], torch.full((9,), step))
            for hours in jumps:
                monkeypatch.setattr(time, "time", lambda hours=hours: right() + hours * HOUR)
                step += 1
                result = checkpointer.save_checkpoint(step, {"step": step, "weights": torch.full((9,), step)})
                assert result.saved, result.reason
                checkpointer.wait_latest_checkpoint()
            return step, checkpointer.loaded_from

    assert run(12, -12, 3, -3) == (4, "")
    assert [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()] == [4, 3]
    times = {stored.id.step: stored.manifest.time for stored in CheckpointDirectory(directory).checkpoints()}
    assert times[3] - times[4] > 5 * HOUR, "no jump was seen"
    for draft in ("tmp-1-9-0", "dropped-1-1-0"):  # of a writer that died, before the clock was put back
        made = directory / ".fastckpt" / draft
        made.mkdir()
        os.utime(made, (right() + 9 * HOUR,) * 2)
    assert run(-9, 9) == (6, "storage")
    assert [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()] == [6, 5]
    assert not [*(directory / ".fastckpt").glob("*-1-*")], "drafts stay"
