"""Waits that are sound, of all kinds: none is taken for a hang that must be ended. A second stands for a minute."""

import inspect
import re
import sys
import threading
import time

import pytest

from tests.e2e.launcher.conftest import Jobs, program
from tests.e2e.launcher.programs.sound_waits import WAITS
from tests.json_lines import whole_lines

SECONDS = 4.0
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
    found = [line.split()[1] for line in out.splitlines() if line.startswith("waited ")]
    assert found == [wait.__name__ for wait in WAITS], "each once: nothing was repeated"
    lines = whole_lines(jobs.folder / "events")
    assert not [line for line in lines if line["event"] in ("hang", "worker_died")]
    assert len([line for line in lines if line["event"] == "workers_started"]) == 1
    told = " ".join(str(one["place"]) for line in lines if line["event"] == "hang_spared" for one in line["ranks"])
    at = {int(number) for number in re.findall(r"sound_waits\.py:(\d+)", told)}
    missing = [wait.__name__ for wait in WAITS if not at & lines_of(wait)]
    print(f"{way} {backend}: {len(WAITS)} waits of {SECONDS} s; not reported: {missing}")
    assert backend == "spins" or set(missing) <= BUSY


def lines_of(function) -> set[int]:
    """The numbers of the lines of a function."""
    text, first = inspect.getsourcelines(function)
    return set(range(first, first + len(text)))
