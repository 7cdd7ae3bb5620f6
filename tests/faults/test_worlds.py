"""Launches in other numbers of ranks, or another sharding, than saved the state, and what plain torch reads of it."""

import signal
import subprocess
import sys

import pytest

from tests.faults.faults import kill, kill_all
from tests.faults.jobs import HERE, Job
from tests.faults.table import FSDP

SAVES = ("--full", "--memory", "1", "--disk", "3")
DCP = "programs/dcp.py"
EACH = 4
"""Steps of each launch."""
Launch = tuple[str, str, int]
"""A program, its way, and a number of ranks."""
TOURS: dict[str, list[Launch]] = {
    "fsdp": [(FSDP, "fsdp2", 2), (FSDP, "tp", 3)],
    "dcp": [(DCP, "", 2), (DCP, "", 1), (DCP, "behind", 2)],
}


@pytest.mark.parametrize("name", TOURS)
def test_a_job_resumes_with_other_ranks_and_plain_torch_reads_what_it_saved(new_job, name: str) -> None:
    """What comes back is what was saved by the shape before, in memory."""
    job: Job = new_job()
    for number, (program, way, ranks) in enumerate(TOURS[name]):
        step, is_last = EACH * (number + 1), number == len(TOURS[name]) - 1
        job.with_faults(*[kill_all("train.step", step + 1)] * (not is_last))
        script = (*SAVES, "--way", way, "--steps", str(step + (not is_last)))
        code = job.start(*script, program=program, ranks=ranks, restarts=0).wait()
        assert code == (0 if is_last else -signal.SIGKILL), job.text()
        lines = [line for rank in range(ranks) for line in job.log(rank) if line.get("start") == [job.launches, 0]]
        found = [tuple(line.get(name) for name in ("world", "loaded", "tier", "equal")) for line in lines]
        assert found == [(ranks, step - EACH, "memory", True) if number else (ranks, 0, "", None)] * ranks, job.text()
    command = [sys.executable, "-m", f"tests.e2e.{name}.stock", str(job.folder)]
    stock = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=HERE.parents[1])
    assert stock.returncode == 0, stock.stderr
    last = EACH * len(TOURS[name])
    [line] = [line for line in stock.stdout.splitlines() if line.split()[0] in (str(last), f"checkpoint-{last}")]
    if name == "fsdp":
        shards = [f"__{rank}_0.distcp" for rank in range(3)]
        assert line.split()[1:] == [".metadata", *shards, "manifest.json", *(f"rank_{rank}.pt" for rank in range(3))]
    else:
        assert line.endswith("2 files, 1 table")


def test_an_fsdp_job_whose_state_changes_its_structure_resumes(new_job) -> None:
    """In all ranks at once, and in the one that writes a value which outgrows its place."""
    job = new_job().with_faults(kill(1, at="snapshot.fill", step=19))
    job.run("--widen-at", "9", "--text", "150", "--memory", "1", "--disk", "4", "--wait", program=FSDP)
    assert all(len(losses) == 1 for rank in (0, 1) for losses in job.losses(rank).values()), job.text()
    assert job.resumes()[1][1] == "memory"
    lines = [line for rank in (0, 1) for line in job.log(rank)]
    assert {line.get("collectives", 0) for line in lines} == {0}, "no save makes any"
    changed = {line["skipped"] for line in lines if "structure" in line.get("reason", "")}
    assert len(changed) > 1 and not any(step % 4 == 0 for step in changed), "to DISK ranks save together"
    assert not {step + 1 for step in changed} & changed, "the ranks have planned again"
    persisted = [{line["saved"] for line in job.log(rank) if line.get("saved", 1) % 4 == 0} for rank in (0, 1)]
    assert persisted[0] == persisted[1] and persisted[0] <= set(job.stored())
