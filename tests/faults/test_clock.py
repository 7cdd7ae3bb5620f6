"""A clock of the day that jumps by hours, both ways, for all processes of a job: nothing is timed by it."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.jobs import HERE

HOUR = 3600


class Clock:
    """The clock of all processes that have its variables."""

    def __init__(self, folder: Path) -> None:
        self._file, shim = folder / "offset", folder / "clock.so"
        self.set(0)
        command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(shim), str(HERE / "clock_shim.c")]
        subprocess.run(command, check=True)
        self.variables = {"LD_PRELOAD": str(shim), "TEST_CLOCK": str(self._file)}

    def set(self, hours: float) -> None:
        """As many hours more than there are, in one store of eight bytes."""
        with open(os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
            file.write(struct.pack("<q", int(hours * HOUR)))


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path)


SCRIPT = """
import os, struct, sys, torch
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy
directory, clock, *jumps = sys.argv[1:]
with DdpCheckpointer(directory, deletion_strategy=KeepLatestStepStrategy(2, directory)) as checkpointer:
    loaded = checkpointer.load_checkpoint()
    step = loaded["step"] if loaded else 0
    assert not loaded or torch.equal(loaded["weights"], torch.full((9,), step))
    for hours in jumps:
        with open(clock, "r+b") as file:
            file.write(struct.pack("<q", int(float(hours) * 3600)))
        step += 1
        result = checkpointer.save_checkpoint(step, {"step": step, "weights": torch.full((9,), step)})
        assert result.saved, result.reason
        checkpointer.wait_latest_checkpoint()
print(step, checkpointer.loaded_from or "nothing")
"""


def test_saves_persists_and_retention_under_a_clock_that_jumps_are_as_without(clock: Clock, tmp_path: Path) -> None:
    """From one save to the next, and from one process to the next, which began hours before the last one ended."""
    directory = tmp_path / "checkpoints"

    def run(*jumps: float) -> str:
        arguments = [sys.executable, "-c", SCRIPT, str(directory), clock.variables["TEST_CLOCK"], *map(str, jumps)]
        variables = os.environ | clock.variables
        done = subprocess.run(arguments, env=variables, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run(12, -12, 3, -3) == "4 nothing"
    assert [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()] == [4, 3]
    times = {stored.id.step: stored.manifest.time for stored in CheckpointDirectory(directory).checkpoints()}
    assert times[3] - times[4] > 5 * HOUR, "no jump was seen"
    for draft in ("tmp-1-9-0", "dropped-1-1-0"):  # of a writer that died, before the clock was put back
        made = directory / ".fastckpt" / draft
        made.mkdir()
        os.utime(made, (time.time() + 9 * HOUR,) * 2)
    assert run(-9, 9) == "6 storage"
    assert [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()] == [6, 5]
    assert not [*(directory / ".fastckpt").glob("*-1-*")], "drafts stay"
