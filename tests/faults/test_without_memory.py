"""A container with docker's 64 MB of /dev/shm: the error, and a job with checkpoints on a disk instead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import arena_path
from tests.faults.faults import kill, kill_agent
from tests.faults.jobs import HERE, STORE_OF_ITS_OWN, TORCHRUN, Job, assert_as_if_nothing_had_happened
from tests.support.live_folders import remove_live

DOCKER = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
"""Runs a command that sees another /dev/shm than everybody else."""


@pytest.fixture(autouse=True)
def permitted() -> None:
    done = subprocess.run([*DOCKER, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot give a process a /dev/shm of its own: {done.stderr.strip()}")


def start(
    job: Job, *script: str, launcher: tuple[str, ...] = (), ours: tuple[str, ...] = (), **environment: str
) -> Job:
    """Start a job in such a container; ``ours`` are options of fastckpt-run."""
    enter = f"import os, sys; os.execvp('unshare', {[*DOCKER, sys.executable]} + sys.argv[1:])"
    shape = ("--standalone", "--nproc-per-node", "2", "--max-restarts", str(len(job.faults)))
    launcher = launcher or (str(HERE / "launch.py"), str(job.folder), *shape, *ours)
    return job.start(*script, launcher=("-c", enter, *launcher), FASTCKPT_SHM_DIR="/dev/shm", **environment)


def arena(job: Job) -> Path:
    """Where it has its arena: its temporary directory is its folder."""
    return arena_path(str(job.folder), os.path.realpath(job.checkpoint_dir), 0)


def test_a_memory_that_is_too_small_is_refused_with_size_limit_and_remedy(new_job):
    job = start(new_job(), "--ballast", "40")
    assert job.wait() == 1
    assert "ArenaTooSmall: shared memory cannot hold 2 x 40.1 MiB, 80.2 MiB in all: /dev/shm has " in job.text()
    assert " MiB free of 64.0 MiB. Enlarge it (docker: --shm-size=128m; Kubernetes: emptyDir: " in job.text()
    assert "{medium: Memory, sizeLimit: 128Mi} mounted at /dev/shm)" in job.text()
    assert "with --fast-no-memory (without fastckpt-run: FASTCKPT_MEMORY=off)" in job.text()
    assert "0.00 " not in job.text() and "two slots only" not in job.text()


def test_a_job_without_memory_trains_and_resumes_from_files_on_a_disk(new_job, uninterrupted):
    """A worker dies, the agent dies and its files stay, the agent dies and its files are lost."""
    job = new_job().with_faults(
        kill(rank=1, at="snapshot.fill", step=16),
        kill_agent(at="snapshot.fill", step=32),
        kill_agent(at="snapshot.fill", step=46),
    )
    for launch in range(2):
        start(job, "--ballast", "40", "--wait", ours=("--fast-no-memory",))
        assert job.wait() == -9, job.text()
        assert (arena(job) / "slot-1").is_dir()
        if launch:
            remove_live(arena(job))
    start(job, "--ballast", "40", "--wait", ours=("--fast-no-memory",))
    assert job.wait() == 0, job.text()
    assert job.resumes()[1:] == [(14, "memory"), (30, "memory"), (40, "storage")]
    assert not arena(job).exists()
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=6)


def test_a_job_without_memory_resumes_under_plain_torchrun(new_job, uninterrupted):
    """The first rank, whose process holds the saver, is killed, so that nothing is flushed.

    When another is killed, it depends on torchrun's speed whether the first rank is ended or leaves by gloo's error;
    in the second case it flushes, and the resume is from storage.
    """
    job = new_job().with_faults(kill(rank=0, at="train.step", step=25))
    start(job, "--ballast", "40", "--wait", launcher=TORCHRUN, FASTCKPT_MEMORY="off", **STORE_OF_ITS_OWN)
    assert job.wait() == 0, job.text()
    ((step, tier),) = job.resumes()[1:]
    assert 20 <= step <= 24 and tier == "memory"
    assert not arena(job).exists()
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=10)
