"""A worker killed as a save or a persist enters each of its phases, and in the middle of a fill."""

import pytest

from tests.faults.faults import kill
from tests.faults.jobs import assert_all_struck, assert_as_if_nothing_had_happened

SNAPSHOT = ("snapshot.skeleton", "snapshot.fill", "snapshot.commit", "snapshot.notify")
PERSIST = ("persist.write", "persist.manifest", "persist.rename", "persist.tracker")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_in_each_phase_of_a_save(new_job, uninterrupted, rank):
    job = new_job().befalls(*(kill(rank=rank, at=phase, step=8 + 8 * i) for i, phase in enumerate(SNAPSHOT)))
    job.run()
    assert_all_struck(job)
    assert_as_if_nothing_had_happened(job, uninterrupted())
    # a save counts from the last writer's record on
    assert [step for step, _ in job.resumes()] == [0, 6, 14, 22, 32] or job.skips(), job.text()
    assert {tier for _, tier in job.resumes()[1:]} == {"memory"}


def test_a_kill_in_each_phase_of_a_persist(new_job, uninterrupted):
    job = new_job().befalls(*(kill(rank=i % 2, at=phase, step=10 + 10 * i) for i, phase in enumerate(PERSIST)))
    job.run()
    assert_all_struck(job)
    assert_as_if_nothing_had_happened(job, uninterrupted())
    assert {tier for _, tier in job.resumes()[1:]} == {"memory"}


def test_kills_in_the_middle_of_a_fill(new_job, uninterrupted):
    """The state has 6 parameters, 12 moments, 6 counters and the generator; rank 1 copies its generator alone."""
    faults = [
        kill(rank=0, at="snapshot.fill", step=6 + 6 * i, copied=copied) for i, copied in enumerate((0, 5, 11, 24))
    ]
    job = new_job().befalls(*faults, kill(rank=1, at="snapshot.fill", step=28, copied=0))
    job.run()
    assert_all_struck(job)
    assert_as_if_nothing_had_happened(job, uninterrupted())
    assert [step for step, _ in job.resumes()] == [0, 4, 10, 16, 22, 26] or job.skips(), job.text()
