"""The same script under plain torchrun, as users start it: killed workers start again and resume what is there."""

import re

import pytest

from tests.faults.faults import Fault, kill, kill_both
from tests.faults.jobs import (
    STORE_OF_ITS_OWN,
    TORCHRUN,
    Job,
    assert_all_injected,
    assert_as_if_nothing_had_happened,
    launcher_for,
)
from tests.faults.test_phases import RESUME, SNAPSHOT
from tests.support.ports import free_port

INTERVAL = 10
"""Steps between two saves to storage: what is in memory goes with the first rank, unless the next finds it."""
SAVES = {
    f"rank {rank} in each phase of a save": [
        kill(rank=rank, at=each, step=8 + 8 * i) for i, each in enumerate(SNAPSHOT)
    ]
    for rank in (0, 1)
}
RESUMES = [kill(rank=rank, at=each) for each in RESUME for rank in (0, 1)]
CASES: dict[str, list[Fault]] = SAVES | {
    "both in each phase of a save": [kill_both(at=each, step=8 + 8 * i) for i, each in enumerate(SNAPSHOT)],
    "a rank in each phase of a resume": [kill(rank=1, at="snapshot.fill", step=20), *RESUMES],
    "rank 0 in the middle of a fill": [
        kill(rank=0, at="snapshot.fill", step=6 + 6 * i, copied=i * 5) for i in range(4)
    ],
}


def by_address() -> tuple[str, ...]:
    """torchrun with a master address, whose store outlives the workers whatever is set."""
    return *TORCHRUN[:2], "--master-addr", "127.0.0.1", "--master-port", str(free_port()), *TORCHRUN[3:]


def run(job: Job, launcher: str) -> None:
    if launcher == "standalone":
        job.run(launcher=TORCHRUN, **STORE_OF_ITS_OWN)
    else:
        job.run(launcher=by_address())


@pytest.mark.parametrize("launcher", ["standalone", "address"])
def test_killed_workers_resume_under_plain_torchrun(new_job, uninterrupted, launcher):
    job = new_job().with_faults(kill(rank=1, at="train.step", step=25), kill(rank=0, at="snapshot.skeleton", step=44))
    run(job, launcher)
    assert job.injected() == 2
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=INTERVAL)
    starts = len(job.resumes())
    assert job.text().count("not started by fastckpt-run") == starts == 3


@pytest.mark.parametrize("launcher", ["fastckpt-run", "torchrun"])
def test_workers_that_see_their_own_device_alone_resume(new_job, uninterrupted, launcher):
    job = new_job().with_faults(kill(rank=1, at="train.step", step=25))
    ours = (*launcher_for(job.folder), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    command = ours if launcher == "fastckpt-run" else TORCHRUN
    job.run(launcher=(*command, "--virtual-local-rank"), **STORE_OF_ITS_OWN)
    assert job.injected() == 1
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=INTERVAL)


@pytest.mark.campaign
@pytest.mark.parametrize("launcher", ["standalone", "address"])
@pytest.mark.parametrize("case", CASES)
def test_each_case_of_kills_resumes_under_plain_torchrun(new_job, uninterrupted, case, launcher):
    job = new_job().with_faults(*CASES[case])
    run(job, launcher)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=INTERVAL)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_jobs_with_torchs_own_store_restart_after_a_kill(new_job, uninterrupted):
    """Killed at any instant, also before all have met, when gloo's addresses stay: that is torch's to mend."""
    ends = []
    for number in range(20):
        job = new_job(str(number)).with_faults(kill(rank=number % 2, at="snapshot.fill", step=7 + 2 * number))
        code = job.start(launcher=TORCHRUN).wait()
        assert "NoLoadableCheckpoint" not in job.text()
        if code:
            ends.append(re.findall(r"\w+Error: .*", job.text())[-1:])
        else:
            assert_as_if_nothing_had_happened(job, uninterrupted(), interval=INTERVAL)
    assert len(ends) <= 1, ends
