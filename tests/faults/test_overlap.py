"""Workers and agents killed during a background copy: the checkpoint before is resumed, bit for bit."""

import pytest

from tests.faults.faults import kill, kill_agent, kill_both
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened

PHASES = ("overlap.copy", "overlap.compare", "overlap.commit", "overlap.notify", "overlap.wait")


def assert_survived(job: Job, reference: Job) -> None:
    """All saves of the rank that copies the model were pending but each start's first, which is copied at once."""
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, reference, interval=4)
    for start in job.starts():
        asked = [line for line in start[0] if "saved" in line or "pending" in line]
        assert [next(iter(line)) for line in asked[:1]] in ([], ["saved"]), asked
        done = [line["saved"] for line in asked[1:] if "saved" in line]
        assert done == [line["pending"] for line in asked if "pending" in line][: len(done)], job.text()


def test_a_worker_killed_amid_a_background_copy_resumes_the_checkpoint_before(new_job, uninterrupted):
    """The state has 6 parameters, 12 moments and 6 counters; each slot has been used before."""
    faults = [kill(rank=0, at="overlap.copy", step=10 + 10 * i, copied=copied) for i, copied in enumerate((0, 7, 23))]
    job = new_job().with_faults(*faults, kill(rank=0, at="overlap.commit", step=44)).run("--overlap")
    assert_survived(job, uninterrupted())
    resumes = [(0, ""), (8, "memory"), (18, "memory"), (28, "memory"), (42, "memory")]
    assert job.resumes() == resumes or job.skips(), job.text()


@pytest.mark.campaign
def test_workers_killed_in_each_phase_of_an_overlapped_save_resume_bit_for_bit(new_job, uninterrupted):
    faults = [kill(rank=0, at=phase, step=6 + 6 * i) for i, phase in enumerate(PHASES)]
    faults += [kill_both(at=phase, step=36 + 6 * i) for i, phase in enumerate(PHASES[:4])]
    assert_survived(new_job().with_faults(*faults).run("--overlap"), uninterrupted())


@pytest.mark.campaign
def test_the_agent_killed_during_a_background_copy_resumes_bit_for_bit(new_job, uninterrupted):
    faults = [kill_agent(at=phase, step=8 + 10 * i) for i, phase in enumerate(PHASES)]
    assert_survived(new_job().with_faults(*faults).run_to_the_end("--overlap", "--disk", "4"), uninterrupted())
