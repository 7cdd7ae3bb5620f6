"""Jobs of two ranks on one scratch directory: gradients of a job without offloading, also after kills."""

import os
import shutil

import pytest

from tests.e2e.offload.conftest import PROGRAM
from tests.faults.faults import kill, kill_both
from tests.faults.jobs import assert_all_injected, assert_as_if_nothing_had_happened

PHASES = ("offload.forward", "offload.wait_for_writes", "offload.write", "offload.plan", "offload.read")
"""`offload.wait_for_reads` is entered only if a thread reads just then what is needed."""
STEPS = ("--steps", "4", "--memory", "1")


def run(job, *arguments, **options):
    return job.run(*STEPS, *arguments, program=PROGRAM, **options)


@pytest.fixture
def scratch(tmp_path):
    path = tmp_path / "scratch"
    path.mkdir()
    yield path
    assert os.listdir(path) == [], "nothing is left, whatever befell the job"


def endings(job) -> list[str]:
    return [(job.folder / f"{name}.{rank}").read_text() for name in ("end", "gradients") for rank in (0, 1)]


@pytest.mark.parametrize("way", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.campaign)])
def test_gradients_of_two_ranks_are_bitwise_those_without_offloading(new_job, scratch, uninterrupted, way):
    """They have no checkpointer, and so no log of events."""
    plain = uninterrupted(*STEPS, "--way", way)
    job = run(new_job(), "--way", way, "--offload", str(scratch))
    assert endings(job) == endings(plain) and not job.checkpoint_dir.exists()
    reports = [next(line for line in job.log(rank) if "written" in line) for rank in (0, 1)]
    assert all(each["written"] > 60 << 20 and each["read"] > 30 << 20 for each in reports), reports
    assert all(each["planned"] and not each["failure"] for each in reports), reports


def test_a_job_killed_in_each_phase_of_a_step_resumes_bit_for_bit(new_job, scratch, uninterrupted):
    faults = [kill(rank=turn % 2, at=phase, step=1 + turn % 3) for turn, phase in enumerate(PHASES)]
    job = new_job().with_faults(*faults, kill_both(at="offload.write"))
    run(job, "--offload", str(scratch))
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(*STEPS))
    shutil.rmtree(job.folder / "checkpoints")
