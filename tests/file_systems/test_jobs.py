"""Jobs whose checkpoint directory is on a FUSE file system that fails, stops and dies; and jobs on each file system."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.jobs import Job, assert_as_if_nothing_had_happened
from tests.file_systems import operations
from tests.file_systems.kills import survive
from tests.file_systems.mounts import FILE_SYSTEMS, mounted, own_fuse, unmount, version_of
from tests.file_systems.table import record
from tests.support.live_folders import remove_live

pytestmark = pytest.mark.campaign


def restarts(job: Job) -> int:
    return len(job.resumes(0))


def test_a_job_goes_on_while_its_file_system_fails_stops_and_dies(
    mounting: ExitStack, tmp_path: Path, new_job, uninterrupted
) -> None:
    """No room at close; a server that answers nothing for a while, a rank that dies then; a server that is killed."""
    fuse = mounted(mounting, tmp_path, own_fuse)
    job = new_job(checkpoint_dir=fuse.path / "checkpoints")
    job.start("--wait-at", "10", "20", "30", "40", restarts=2)
    job.wait_for_all(10)
    job.until(lambda: job.persisted(10), "step 10 durable")

    fuse.order('{"fail": {"FLUSH": "ENOSPC"}}')
    job.go_on(10)
    job.wait_for_all(20)
    job.until(lambda: "could not be persisted" in job.text(), "a failure")
    assert "No space left on device" in job.text()
    fuse.order()
    job.until(lambda: job.persisted(20), "step 20 durable")

    os.kill(fuse.server.pid, signal.SIGSTOP)
    job.go_on(20)
    job.wait_for_all(30)
    before = job.pid(0)
    job.kill_processes(1)
    job.until(lambda: job.pid(0) != before, "restarted workers")
    os.kill(fuse.server.pid, signal.SIGCONT)
    job.until(lambda: job.persisted(30), "step 30 durable")
    job.until(lambda: restarts(job) == 2, "a resume")
    assert job.resumes(0)[1] == (30, "memory")

    fuse.server.kill()
    fuse.server.wait()
    job.go_on(30)
    job.wait_for_all(40)
    job.until(lambda: "not connected" in job.text(), "a failure")
    job.kill_processes("agent", 0, 1)
    job.wait()
    code = job.start().wait()
    assert code != 0 and restarts(job) == 2, "no fresh start on a mount that is dead"
    unmount(fuse.path)
    mounting.enter_context(own_fuse(tmp_path / "file-system"))
    job.run()
    assert job.resumes(0)[-1] == (40, "memory")
    assert [step for step in job.stored() if step % 10 == 0][-3:] == [30, 20, 10]
    assert_as_if_nothing_had_happened(job, uninterrupted())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FILE_SYSTEMS)
def test_on_each_file_system_jobs_that_are_killed_resume_from_memory_and_from_storage(
    name: str, mounting: ExitStack, tmp_path: Path, new_job, uninterrupted
) -> None:
    """A rank, the agent, all with their memory; the results are recorded for docs/clusters/file_systems.md."""
    path = mounted(mounting, tmp_path, FILE_SYSTEMS[name]).path
    record(name, version=version_of(name), **operations.all_on(path / "operations"))
    kills = survive(path / "killed", int(os.environ.get("STRIDE", "1")))
    job = new_job(checkpoint_dir=path / "checkpoints")
    job.start("--wait-at", "16", "36", restarts=2)
    job.wait_for_all(16)
    job.kill_processes(1)
    job.until(lambda: restarts(job) == 2, "a resume")
    job.go_on(16)
    job.wait_for_all(36)
    job.until(lambda: job.persisted(30), "step 30 durable")
    job.kill_processes("agent", 0, 1)
    job.wait()
    job.start("--wait-at", "46", restarts=2)
    job.wait_for_all(46)
    job.until(lambda: job.persisted(40), "step 40 durable")
    job.kill_processes("agent", 0, 1)
    job.wait()
    remove_live(job.arena())
    job.run()
    resumes = job.resumes(0)[1:]
    assert [tier for _, tier in resumes] == ["memory", "memory", "storage"] and resumes[2][0] >= 40, resumes
    assert job.ends() == uninterrupted().ends()
    for rank in (0, 1):
        assert job.losses(rank) == uninterrupted().losses(rank)
    record(name, **{"kills in a publication": kills, "jobs killed": len(resumes)})
