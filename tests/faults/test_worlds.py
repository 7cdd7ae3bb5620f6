"""Launches in other numbers of ranks, or another sharding, than saved the state, and what plain torch reads of it."""

import signal
import subprocess
import sys

from tests.faults.faults import kill_all
from tests.faults.jobs import HERE, Job
from tests.faults.table import FSDP

SAVES = ("--full", "--memory", "1", "--disk", "3")
EACH = 4
"""Steps of each launch."""
LAUNCHES = [("fsdp2", 2), ("tp", 3)]
"""Ways of the program, and numbers of ranks."""


def test_a_job_resumes_with_other_ranks_and_plain_torch_reads_what_it_saved(new_job) -> None:
    """What comes back is what was saved by the shape before, in memory."""
    job: Job = new_job()
    for number, (way, ranks) in enumerate(LAUNCHES):
        step, is_last = EACH * (number + 1), number == len(LAUNCHES) - 1
        job.with_faults(*[kill_all(at="train.step", step=step + 1)] * (not is_last))
        script = (*SAVES, "--way", way, "--steps", str(step + (not is_last)))
        code = job.start(*script, program=FSDP, ranks=ranks, restarts=0).wait()
        assert code == (0 if is_last else -signal.SIGKILL), job.text()
        lines = [line for rank in range(ranks) for line in job.log(rank) if line.get("start") == [job.launches, 0]]
        found = [tuple(line.get(name) for name in ("world", "loaded", "tier", "equal")) for line in lines]
        assert found == [(ranks, step - EACH, "memory", True) if number else (ranks, 0, "", None)] * ranks, job.text()
    command = [sys.executable, "-m", "tests.e2e.fsdp.stock", str(job.folder)]
    stock = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=HERE.parents[1])
    assert stock.returncode == 0, stock.stderr
    last = EACH * len(LAUNCHES)
    [line] = [line for line in stock.stdout.splitlines() if line.split()[0] == str(last)]
    shards = [f"__{rank}_0.distcp" for rank in range(3)]
    assert line.split()[1:] == [".metadata", *shards, "manifest.json", *(f"rank_{rank}.pt" for rank in range(3))]
