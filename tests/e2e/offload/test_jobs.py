"""Jobs of two ranks on one scratch directory: gradients of a job without offloading."""

import os

import pytest

from tests.e2e.offload.conftest import PROGRAM

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


def test_gradients_of_two_ranks_are_bitwise_those_without_offloading(new_job, scratch, uninterrupted):
    """They have no checkpointer, and so no log of events."""
    plain = uninterrupted(*STEPS, "--way", "fsdp2")
    job = run(new_job(), "--way", "fsdp2", "--offload", str(scratch))
    assert endings(job) == endings(plain) and not job.checkpoint_dir.exists()
    reports = [next(line for line in job.log(rank) if "written" in line) for rank in (0, 1)]
    assert all(each["written"] > 60 << 20 and each["read"] > 30 << 20 for each in reports), reports
    assert all(each["planned"] and not each["failure"] for each in reports), reports
