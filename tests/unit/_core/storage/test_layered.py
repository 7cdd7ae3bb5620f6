"""Checkpoints that came with the image of a container: replaced, deleted and quarantined on a real overlay."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.own_disk import UNSHARE, needs_mounts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.campaign)])
def test_each_operation_killed_anywhere_on_an_overlay_is_done_or_not(fast_path: Path, stride: int) -> None:
    needs_mounts()
    script = str(Path(__file__).with_name("layered.py"))
    command = [*UNSHARE, sys.executable, script, str(fast_path), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed before") == 8
