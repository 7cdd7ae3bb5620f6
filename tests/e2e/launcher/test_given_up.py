"""A flush that does not end keeps neither the job nor the process."""

import subprocess
import sys
import time
from pathlib import Path

LAUNCH = """
import sys, time
from fastckpt._core import metrics
from fastckpt_run.main import main
metrics.observe(lambda phase, fields: time.sleep(120) if phase == "persist.write" else None)
main(sys.argv[1:])
"""
TRAIN = """
import sys, torch
from fastckpt import DdpCheckpointer
DdpCheckpointer(sys.argv[1]).save_checkpoint(1, {"w": torch.ones(3)})
"""


def test_the_flush_timeout_ends_a_launcher_whose_flush_hangs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = ["--standalone", "--nproc-per-node=1", f"--log-dir={tmp_path / 'logs'}", str(script)]
    command.append(str(tmp_path / "checkpoints"))
    start = time.monotonic()
    once = [sys.executable, "-c", LAUNCH, "--fast-flush-timeout=1", *command]
    done = subprocess.run(once, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 75, done.stderr  # nothing at all is durable
    assert "step 1 of history 1 is in memory only" in done.stderr
    assert time.monotonic() - start < 100
    again = [sys.executable, "-m", "fastckpt_run", *command]
    done = subprocess.run(again, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
