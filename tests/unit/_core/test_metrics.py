"""Events inform observers: losing them stops no job."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core import metrics


@pytest.fixture(autouse=True)
def no_events_after() -> Iterator[None]:
    yield
    metrics.write_events_to("")


def test_a_full_disk_loses_events_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCKPT_EVENTS", "/dev/full")
    lost = metrics.counts["events_lost"]
    with DdpCheckpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            assert checkpointer.save_checkpoint(step, {"w": torch.ones(3)}, storage_type=StorageType.DISK)
            assert checkpointer.wait_latest_checkpoint(60) == step
        assert checkpointer.load_checkpoint()["w"][0] == 1
    assert metrics.counts["events_lost"] - lost >= 4


def test_an_event_that_is_written_in_part_is_dropped(tmp_path: Path) -> None:
    program = """
import resource, sys
from fastckpt._core import metrics
metrics.write_events_to(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
metrics.event("saved", text="x" * 200)
print(metrics.counts["events_lost"])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "events")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, (tmp_path / "events").stat().st_size) == ("1\n", 100), done.stderr
