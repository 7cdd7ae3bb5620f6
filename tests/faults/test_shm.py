"""Shared memory that is too small, is filled up by others, or is removed under a running job."""

import contextlib
import re
import time
from pathlib import Path

import pytest

from tests.faults.faults import fill, kill, kill_agent
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened
from tests.faults.test_phases import LAUNCH, PERSIST, RESUME, SNAPSHOT
from tests.support.live_folders import remove_live
from tests.unit._core.memory.conftest import small_tmpfs  # noqa: F401 (a fixture)


@pytest.fixture
def tmpfs(small_tmpfs, new_job):  # noqa: F811
    """64 MiB, as docker gives by default; jobs end before it is unmounted."""
    path = small_tmpfs(64)
    yield path
    new_job.end()


@contextlib.contextmanager
def filled(path: Path):
    """Filled up to the last byte by another process's file."""
    ballast = path / f"ballast-{time.monotonic_ns()}"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    yield
    ballast.unlink()


def reasons(job: Job) -> dict[int, str]:
    return {line["skipped"]: line["reason"] for line in job.log(0) if "skipped" in line}


def reasons_of_memory(job: Job) -> dict[int, str]:
    """Without those of saves that found the disk too slow."""
    return {step: reason for step, reason in reasons(job).items() if "is being persisted" not in reason}


def test_a_state_that_never_fits_is_refused_at_the_first_save(tmpfs, new_job):
    job = new_job().start("--ballast", "40", restarts=0)
    assert job.wait() == 1
    # Whether the few kB of rank 1 are counted depends on which of the two asks first.
    assert re.search(r"ArenaTooSmall: shared memory cannot hold 2 x 40\.1 MiB, 80\.[12] MiB in all: ", job.text())
    assert re.search(rf": {tmpfs} has 60\.\d MiB free of 64\.0 MiB\. Enlarge it \(docker: --shm-size=128m", job.text())
    assert "--fast-shm-dir" in job.text() and "two slots only" not in job.text()
    with filled(tmpfs):
        job = new_job("full").start(restarts=0)
        assert job.wait() == 1
    assert f"ArenaTooSmall: nothing can be written under {tmpfs}: [Errno 28] No space left" in job.text()
    assert "in use" not in job.text()


def test_a_state_that_outgrows_memory_is_skipped_and_training_goes_on(tmpfs, new_job, uninterrupted):
    job = new_job().run("--ballast", "10", "40", "--grow-at", "40")
    assert_as_if_nothing_had_happened(job, uninterrupted())
    told = reasons_of_memory(job)
    assert set(told) <= set(range(40, 61, 2)) <= set(reasons(job))
    assert any(re.search(r"cannot hold [23] x 40\.1 MiB", reason) for reason in told.values()), reasons(job)
    assert all("cannot hold" in reason or "waits for local rank 0" in reason for reason in told.values())
    assert 0 < job.stored()[0] < 40


def test_memory_filled_by_another_process_skips_saves_until_there_is_room(tmpfs, new_job, uninterrupted):
    """Saves are skipped while not a page is left, even over a restart, and when the job's own memory is gone."""
    job = new_job().with_faults(kill(rank=0, at="train.step", step=16), kill(rank=1, at="snapshot.fill", step=50))
    job.start("--ballast", "8", "--wait-at", "10", "20", "30", "--disk", "14", "--wait")
    job.wait_for_all(10)
    with filled(tmpfs):
        job.go_on(10)
        job.wait_for_all(20)
        remove_live(job.arena())
        with filled(tmpfs):
            job.go_on(20)
            job.wait_for_all(30)
    job.go_on(30)
    assert job.wait() == 0, job.text()
    told = reasons_of_memory(job)
    assert set(range(22, 31, 2)) <= set(told) <= set(range(12, 31, 2))
    assert all("No space left" in reason or "cannot hold" in reason for reason in told.values()), told
    assert [tier for _, tier in job.resumes()] == ["", "memory", "memory"]
    assert job.resumes()[2] == (48, "memory")
    assert_as_if_nothing_had_happened(job, uninterrupted())


def test_an_arena_removed_under_a_running_job_is_created_again(new_job, uninterrupted):
    """Twice: when nothing else happens, and right before a worker dies. Then storage is what is left."""
    job = new_job().with_faults(kill(rank=1, at="snapshot.fill", step=16), kill(rank=0, at="train.step", step=31))
    job.start("--wait-at", "10", "30", "--wait")
    for step in (10, 30):
        job.wait_for_all(step)
        assert job.stored()[0] == step
        remove_live(job.arena())
        job.go_on(step)
    assert job.wait() == 0, job.text()
    assert job.resumes()[1:] == [(14, "memory"), (30, "storage")]
    assert "was removed: what was in memory is lost" in job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted())


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [
        ("arena.reserve", 0.5),
        *(
            pytest.param(phase, 2.0, marks=pytest.mark.campaign)
            for phase in ("arena.reserve", *SNAPSHOT, *PERSIST, *RESUME, *LAUNCH)
        ),
    ],
)
def test_memory_that_is_filled_in_a_phase_costs_saves_and_no_step(tmpfs, new_job, uninterrupted, phase, seconds):
    """For a moment, or for long; a worker that dies then resumes all the same."""
    dies = kill(rank=1, at="train.step", step=25)
    faults = {
        SNAPSHOT: [fill(seconds, at=phase, step=24), dies],
        PERSIST: [fill(seconds, at=phase, step=20), dies],
        RESUME: [dies, fill(seconds, at=phase)],
        LAUNCH: [kill_agent(at="train.step", step=25), fill(seconds, at=phase)],
    }
    mine = next((found for phases, found in faults.items() if phase in phases), [fill(seconds, at=phase), dies])
    job = new_job().with_faults(*mine)
    job.run_to_the_end("--ballast", "8", "--named", "--disk", "4")
    print(phase, seconds, job.injected(), job.resumes(), reasons_of_memory(job))
    assert_as_if_nothing_had_happened(job, uninterrupted(), 10)
    assert job.stored()[0] == job.newest_saved()
