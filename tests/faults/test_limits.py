"""A job whose memory limit is below the needs of its checkpoints: an error before anything is killed."""

import os
from pathlib import Path

import pytest

from tests.faults.faults import kill, kill_agent, starve
from tests.faults.jobs import assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.test_phases import LAUNCH, PERSIST, RESUME, SNAPSHOT

MIB = 1 << 20
LIMIT = 1150
"""Of which a job of forks takes 180, and up to 800 for a state of 400 that makes way for the next one."""


@pytest.fixture
def group():
    """A cgroup of version 1 whose members may take so much memory together."""
    path = Path(f"/sys/fs/cgroup/memory/fastckpt-faults-{os.getpid()}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(LIMIT * MIB))
    except OSError as error:
        if path.is_dir():
            path.rmdir()
        pytest.skip(f"cannot make a cgroup (version 1) with a memory limit: {error}")
    yield path
    path.rmdir()


def start_in(group: Path, job, *script: str, **environment: str):
    return job.start(*script, restarts=0, TEST_CGROUP=str(group), **environment)


def test_a_memory_limit_below_the_size_of_the_arena_is_an_error_and_no_kill(group, new_job, uninterrupted):
    job = start_in(group, new_job(), "--ballast", "400")
    assert job.wait() == 1
    assert "ArenaTooSmall: shared memory cannot hold 2 x 400.1 MiB" in job.text()
    assert f"the memory limit of cgroup {group} has" in job.text() and "Raise it (docker: --memory;" in job.text()
    fits = start_in(group, new_job("fits"), "--ballast", "20", "--disk", "20")
    assert fits.wait() == 0, fits.text()
    assert_as_if_nothing_had_happened(fits, uninterrupted())
    outgrown = start_in(group, new_job("outgrown"), "--ballast", "20", "400", "--grow-at", "40")
    assert outgrown.wait() == 0, outgrown.text()
    assert outgrown.stored()[0] < 40
    assert any("cannot hold 2 x 400.1 MiB" in line.get("reason", "") for line in outgrown.log(0))
    disk = {"FASTCKPT_MEMORY": "off", "FASTCKPT_SHM_DIR": "/dev/shm"}
    without = start_in(group, new_job("disk"), "--ballast", "400", "--steps", "8", "--disk", "4", "--wait", **disk)
    assert without.wait() == 0, without.text()
    assert without.stored() == [8, 4] and not without.skips()
    losses = uninterrupted().losses(0)
    assert without.losses(0) == {step: losses[step] for step in range(1, 9)}
    assert "oom_kill 0" in (group / "memory.oom_control").read_text().splitlines()


SUITE = [("agent", "persist.write"), ("template", "snapshot.commit")]
ALL = [
    *(("itself", phase) for phase in (*SNAPSHOT, *RESUME, *LAUNCH, "train.step")),
    *(("agent", phase) for phase in (*SNAPSHOT, *RESUME, *PERSIST)),
    *(("template", phase) for phase in (*SNAPSHOT, *RESUME)),
]


@pytest.mark.parametrize(
    ("victim", "phase"), [*SUITE, *(pytest.param(*each, marks=pytest.mark.campaign) for each in ALL)]
)
def test_whoever_is_killed_for_want_of_memory_in_a_phase_the_job_resumes(
    group, new_job, uninterrupted, victim: str, phase: str
):
    before = [] if phase in (*SNAPSHOT, *PERSIST, "train.step") else [kill(rank=1, at="train.step", step=17)]
    if phase == "arena.adopt":
        before = [kill_agent(at="train.step", step=17)]
    starving = starve(victim, at=phase, step=0 if before else 20)
    job = new_job().with_faults(*before, starving)
    job.run_to_the_end("--named", "--disk", "4", TEST_CGROUP=str(group))
    reasons = {line["reason"] for line in job.log(0) if "reason" in line}
    print(victim, phase, job.launches, job.resumes(), sorted(job.skips()), reasons)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), 4)
    assert job.stored()[0] == job.newest_saved()
    assert "oom_kill 0" not in (group / "memory.oom_control").read_text().splitlines()
