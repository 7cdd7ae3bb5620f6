"""Last reports of workers: readable until the end, whatever a signal interrupts."""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fastckpt._core.memory.telemetry import BLOCKS, TelemetryBlock
from fastckpt._core.saver.worker_progress import WorkerProgress


class Signalled(Exception):
    """As torch raises in the main thread, wherever that is."""


def test_worker_progress_is_readable_after_a_read_interrupted_by_a_signal():
    progress = WorkerProgress(Path(os.environ["FASTCKPT_SHM_DIR"]) / "arena", 1)
    block = BLOCKS / progress.name.strip("/")
    worker = TelemetryBlock(progress.name)
    worker.line(0).begin(generation=3, pid=os.getpid(), stacks=0)
    worker.close()
    assert block.exists()

    def strike(frame: FrameType, event: str, _: Any) -> Any:
        if "phase" in frame.f_locals and "words" in frame.f_locals:
            raise Signalled
        return strike

    before = sys.gettrace()
    sys.settrace(strike)
    try:
        with pytest.raises(Signalled) as signalled:
            progress.read()
    finally:
        sys.settrace(before)
    progress.close()
    assert not block.exists()
    assert progress.read()[0].generation == 3
    del signalled
