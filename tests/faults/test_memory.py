"""Memory that is too small, full, cut or gone, for a job or its host: saves are refused, and no step is lost."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faults import cut, kill, starve
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.table import PERSIST, RESUME, SNAPSHOT, begins_a_start
from tests.faults.test_disk import full
from tests.support.memory_groups import memory_group
from tests.unit._core.memory.conftest import small_tmpfs  # noqa: F401 (a fixture)

LIMIT = 750
"""Of which a job of forks takes 180, and up to 500 for a state of 250 that makes way for the next one."""
campaign = pytest.mark.campaign


# --- images that somebody cuts while the job has them mapped: who touches them dies


@pytest.mark.parametrize(
    ("phase", "part"),
    [("snapshot.fill", 0.0), *(pytest.param(p, 0.5, marks=campaign) for p in (*SNAPSHOT, *PERSIST, *RESUME))],
)
def test_images_that_are_cut_in_a_phase_cost_a_restart_from_what_is_durable(new_job, uninterrupted, phase, part):
    starting = [kill(rank=1, at="train.step", step=17)] * begins_a_start(phase)
    job = new_job().with_faults(*starting, cut(part=part, at=phase, step=0 if starting else 24))
    job.run_to_the_end("--wait", "--named", of=signal.SIGBUS, restarts=5)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=10)
    assert job.stored()[0] == 60


# --- a small or full /dev/shm


@pytest.fixture
def tmpfs(small_tmpfs, new_job) -> Iterator[Path]:  # noqa: F811
    """64 MiB, as docker gives by default; jobs end before it is unmounted."""
    path = small_tmpfs(64)
    yield path
    new_job.end()


def reasons(job: Job) -> dict[int, str]:
    """Without those of saves that found the disk too slow."""
    found = {line["skipped"]: line["reason"] for line in job.log(0) if "skipped" in line}
    return {step: reason for step, reason in found.items() if "is being persisted" not in reason}


def test_memory_filled_by_another_process_or_removed_skips_saves_until_there_is_room(
    tmpfs, new_job, uninterrupted
) -> None:
    """Saves are skipped while not a page is left, even over a restart, and when the job's own memory is gone.

    It is removed once more, where there is room, right before a worker dies: then storage is what is left.
    """
    job = new_job().with_faults(kill(rank=0, at="train.step", step=16), kill(rank=1, at="snapshot.fill", step=40))
    job.with_faults(kill(rank=0, at="train.step", step=51))
    job.start("--ballast", "8", "--wait-at", "10", "20", "30", "50", "--wait").wait_for_all(10)
    with full(tmpfs, 0):
        job.go_on(10)
        job.wait_for_all(20)
        job.lose_memory()
        with full(tmpfs, 0):
            job.go_on(20)
            job.wait_for_all(30)
    job.go_on(30)
    job.wait_for_all(50)
    assert job.stored()[0] == 50
    job.lose_memory()
    job.go_on(50)
    assert job.wait() == 0, job.text()
    told = reasons(job)
    assert set(range(22, 31, 2)) <= set(told) <= set(range(12, 31, 2))
    assert all("No space left" in reason or "cannot hold" in reason for reason in told.values()), told
    assert job.resumes()[1][1] == "memory" and job.resumes()[2:] == [(38, "memory"), (50, "storage")]
    assert "was removed: what was in memory is lost" in job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted())


# --- a limit of memory


@pytest.fixture
def group() -> Iterator[Path]:
    """A group whose members may take so much memory together."""
    with memory_group(f"fastckpt-faults-{os.getpid()}", LIMIT) as path:
        yield path


def killed_in(group: Path) -> bool:
    return "oom_kill 0" not in (group / "memory.oom_control").read_text().splitlines()


def test_a_memory_limit_below_the_size_of_the_arena_is_an_error_and_no_kill(group, new_job, uninterrupted) -> None:
    def start(name: str, *script: str) -> Job:
        job = new_job(name).start(*script, restarts=0, TEST_CGROUP=str(group))
        assert job.wait() == (name == "refused"), job.text()
        return job

    refused = start("refused", "--ballast", "250")
    assert "ArenaTooSmall: shared memory cannot hold 2 x 250.1 MiB" in refused.text()
    assert f"the memory limit of cgroup {group} has" in refused.text() and "Raise it (docker: --mem" in refused.text()
    outgrown = start("outgrown", "--ballast", "20", "250", "--grow-at", "40")
    assert outgrown.stored()[0] < 40
    assert any("cannot hold 2 x 250.1 MiB" in line.get("reason", "") for line in outgrown.log(0))
    assert_as_if_nothing_had_happened(outgrown, uninterrupted())
    assert not killed_in(group)


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("agent", "persist.write"),
        pytest.param("template", "snapshot.commit", marks=campaign),
        *(pytest.param("itself", phase, marks=campaign) for phase in (*SNAPSHOT, "train.step")),
    ],
)
def test_whoever_is_killed_for_want_of_memory_in_a_phase_the_job_resumes(
    group, new_job, uninterrupted, victim: str, phase: str
) -> None:
    job = new_job().with_faults(starve(victim=victim, at=phase, step=20))
    job.run_to_the_end("--named", "--disk", "4", TEST_CGROUP=str(group))
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), 4)
    assert job.stored()[0] == job.newest_saved()
    assert killed_in(group)
