"""Waits that are sound, of all kinds: none is taken for a hang that must be ended. A second stands for a minute."""

import subprocess
import sys
import time

import pytest

from tests.e2e.launcher.conftest import OURS, Jobs, program
from tests.e2e.launcher.programs.sound_waits import WAITS
from tests.support.json_lines import whole_lines

SECONDS = 6.0
SCALED = f"""
from fastckpt._core.policy import hangs
from fastckpt_run.hangs import process_activity
hangs.IDLE = 1.0
hangs.FEW = 0  # each wait is reported, though the one before was as long
process_activity._WINDOW = 0.2
{OURS}
"""
"""A launcher with a second for the minute after which silence is reported."""
BUSY = {
    "program_that_computes",
    "output_that_nobody_reads",
    "computing_in_python",
    "computing_in_c_with_the_gil",
    "evaluation_that_nobody_marked",
}
"""Where something moves, or nobody reads: whether these are reported depends on the moment."""


@pytest.mark.campaign
@pytest.mark.parametrize("backend", ["gloo", "spins"])
def test_no_sound_wait_is_killed_and_those_that_are_idle_are_reported(jobs: Jobs, backend: str) -> None:
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", f"--fast-events={jobs.folder / 'events'}")
    command = [sys.executable, "-c", SCALED, *options, program("sound_waits.py")]
    waits = {"WAIT_BACKEND": backend, "WAIT_SECONDS": str(SECONDS)}
    # Its output is a pipe that nobody reads until it is said that it is full.
    said = (jobs.folder / "said").open("w+")
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=said, env=jobs.environment | waits, cwd=jobs.folder, text=True
    )
    errors = jobs.folder / "said"
    end = time.monotonic() + 600
    while "nobody reads its output" not in errors.read_text():
        assert job.poll() is None and time.monotonic() < end, errors.read_text()[-3000:]
        time.sleep(0.1)
    out, _ = job.communicate(timeout=600)
    said.close()
    assert job.returncode == 0, errors.read_text()[-3000:]
    waited = [line.split()[1:] for line in out.splitlines() if line.startswith("waited ")]
    assert [name for name, *_ in waited] == [wait.__name__ for wait in WAITS], "each once: nothing was repeated"
    lines = whole_lines(jobs.folder / "events")
    assert not [line for line in lines if line["event"] in ("hang", "worker_died")]
    assert len([line for line in lines if line["event"] == "workers_started"]) == 1
    told = [line["monotonic"] for line in lines if line["event"] == "hang_spared"]
    missing = {name for name, began, ended in waited if not any(float(began) < at < float(ended) + 1 for at in told)}
    print(f"{backend}: {len(WAITS)} waits of {SECONDS} s; not reported: {sorted(missing)}")
    assert backend == "spins" or missing <= BUSY
