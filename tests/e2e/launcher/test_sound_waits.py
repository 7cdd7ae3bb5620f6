"""Waits that are sound, of all kinds: none is taken for a hang that must be ended. A second stands for a minute."""

import sys
import threading
import time

import pytest

from tests.e2e.launcher.conftest import Jobs, program
from tests.e2e.launcher.programs.sound_waits import WAITS
from tests.support.json_lines import whole_lines

SECONDS = 6.0
BUSY = {
    "program_that_computes",
    "output_that_nobody_reads",
    "computing_in_python",
    "computing_in_c_with_the_gil",
    "computing_in_torch",
    "evaluation_that_nobody_marked",
}
"""Where something moves, or nobody reads: whether these are reported depends on the moment."""


@pytest.mark.campaign
@pytest.mark.parametrize("backend", ["gloo", "spins"])
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_no_sound_wait_is_killed_and_those_that_are_idle_are_reported(jobs: Jobs, way: str, backend: str) -> None:
    launcher = (sys.executable, program("scaled_launch.py"))
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", f"--fast-events={jobs.folder / 'events'}")
    waits = {"WAIT_WAY": way, "WAIT_BACKEND": backend, "WAIT_SECONDS": str(SECONDS)}
    job = jobs.start(*options, program("sound_waits.py"), launcher=launcher, **waits)
    assert job.stderr is not None and job.stdout is not None
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(job.stderr))
    reader.start()
    end = time.monotonic() + 600
    while not any("nobody reads its output" in line for line in said):  # until then there is room in the pipe, or none
        assert job.poll() is None and time.monotonic() < end, "".join(said)[-3000:]
        time.sleep(0.1)
    out = job.stdout.read()
    reader.join()
    err = "".join(said)
    assert job.wait(60) == 0, err[-3000:]
    waited = [line.split()[1:] for line in out.splitlines() if line.startswith("waited ")]
    assert [name for name, *_ in waited] == [wait.__name__ for wait in WAITS], "each once: nothing was repeated"
    lines = whole_lines(jobs.folder / "events")
    assert not [line for line in lines if line["event"] in ("hang", "worker_died")]
    assert len([line for line in lines if line["event"] == "workers_started"]) == 1
    told = [line["monotonic"] for line in lines if line["event"] == "hang_spared"]
    missing = {name for name, began, ended in waited if not any(float(began) < at < float(ended) + 1 for at in told)}
    print(f"{way} {backend}: {len(WAITS)} waits of {SECONDS} s; not reported: {sorted(missing)}")
    assert backend == "spins" or missing <= BUSY
