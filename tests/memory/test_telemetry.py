"""The block that says how far each worker is, when it can say so no more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastckpt.errors import FastckptError
from fastckpt.memory.telemetry import LINE, Telemetry, TelemetryBlock, telemetry_name, unlink


@pytest.fixture
def block():
    name = telemetry_name(Path(os.environ["FASTCKPT_SHM_DIR"]) / "arena")
    block = TelemetryBlock(name, 3)
    yield block
    block.close()
    unlink(name)


def test_says_nothing_before_the_first_beat(block: TelemetryBlock):
    assert block.read(0) == Telemetry(0, 0, 0, "")


def test_ranks_have_lines_of_their_own(block: TelemetryBlock):
    other = TelemetryBlock(block.name)
    before = time.monotonic_ns()
    for rank in (2, 0, 1):
        other.beat(rank, 7 + rank, 100 * rank, f"phase of {rank}")
    other.close()
    for rank in range(3):
        found = block.read(rank)
        assert (found.generation, found.step, found.phase) == (7 + rank, 100 * rank, f"phase of {rank}")
        assert before <= found.beat <= time.monotonic_ns()
    assert Path("/dev/shm", block.name.strip("/")).stat().st_size == 3 * LINE


@pytest.mark.parametrize(("step", "phase"), [(-1, ""), (2**63 - 1, "x" * 40), (0, "ä" * 30), (5, "y" * 100)])
def test_whatever_the_phase_it_can_be_read(block: TelemetryBlock, step: int, phase: str):
    block.beat(1, 0, step, phase)
    assert block.read(1).step == step
    assert phase.startswith(block.read(1).phase.rstrip("\ufffd"))


def test_one_made_anew_takes_the_place_of_a_stale_one(block: TelemetryBlock):
    block.beat(0, 1, 2, "old")
    new = TelemetryBlock(block.name, 1)
    assert new.read(0) == Telemetry(0, 0, 0, "")
    assert block.read(0).phase == "old"
    new.close()


def test_one_that_is_gone_or_empty_is_an_error_of_ours(block: TelemetryBlock):
    os.truncate(Path("/dev/shm", block.name.strip("/")), 0)
    for name in (block.name, f"{block.name}-nowhere"):
        with pytest.raises(FastckptError, match=name):
            TelemetryBlock(name)


def test_is_private(block: TelemetryBlock):
    assert Path("/dev/shm", block.name.strip("/")).stat().st_mode & 0o777 == 0o600


def test_is_read_after_its_writer_was_killed(block: TelemetryBlock):
    program = f"""
import os, signal
from fastckpt.memory.telemetry import TelemetryBlock
TelemetryBlock({block.name!r}).beat(1, 3, 42, "snapshot.fill")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    found = block.read(1)
    assert (found.generation, found.step, found.phase) == (3, 42, "snapshot.fill")
