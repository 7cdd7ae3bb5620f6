"""Two launches in sequence: after a good end, a signal, a dead agent, and without memory."""

import os
import signal
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import arena_path
from fastckpt._core.memory.telemetry import telemetry_name
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened
from tests.support.live_folders import remove_live


def arena_of(job: Job) -> Path:
    return arena_path(os.environ["FASTCKPT_SHM_DIR"], os.path.realpath(job.checkpoint_dir), 0)


def newest_on_storage(job: Job) -> int:
    return max((stored.id for stored in CheckpointDirectory(job.checkpoint_dir).checkpoints()), default=(0, 0))[1]


def test_a_launch_after_a_good_end_resumes_the_last_flush(new_job, uninterrupted):
    job = new_job().run("--steps", "27")
    saved = job.newest_saved()
    assert saved == 26 or job.skips()
    assert newest_on_storage(job) == saved
    assert not arena_of(job).exists()
    job.run()
    assert job.resumes() == [(0, ""), (saved, "storage")]
    assert_as_if_nothing_had_happened(job, uninterrupted())


@pytest.mark.parametrize("memory", [pytest.param("kept", marks=pytest.mark.campaign), "removed"])
def test_a_launch_after_the_agent_was_killed_resumes_memory_or_storage(new_job, uninterrupted, memory):
    job = new_job().start("--stop-at", "37")
    for rank in (0, 1):
        job.wait_for("waiting", 37, rank)
    to_disk = max({0, 10, 20, 30} - job.skips())
    job.until(lambda: newest_on_storage(job) == to_disk, f"step {to_disk} on storage")
    job.process.kill()
    job.wait()
    assert arena_of(job).is_dir()
    if memory == "removed":
        remove_live(arena_of(job))
    expected = (job.newest_saved(), "memory") if memory == "kept" else (to_disk, "storage")
    job.run()
    assert job.resumes(0) == job.resumes(1) == [(0, ""), expected]
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=2 if memory == "kept" else 10)


def test_a_launch_after_a_signal_to_the_agent_resumes_what_was_flushed(new_job, uninterrupted):
    job = new_job().start("--stop-at", "37")
    for rank in (0, 1):
        job.wait_for("waiting", 37, rank)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 1, job.text()
    saved = job.newest_saved()
    assert newest_on_storage(job) == saved
    assert not arena_of(job).exists()
    assert not Path("/dev/shm", telemetry_name(arena_of(job)).strip("/")).exists()
    job.run()
    assert job.resumes()[1:] == [(saved, "storage")]
    assert_as_if_nothing_had_happened(job, uninterrupted())
