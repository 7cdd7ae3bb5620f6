"""Three ranks, whose sums depend on the order in which DDP reduces gradients."""

import pytest

from tests.faults.faults import kill
from tests.faults.jobs import assert_as_if_nothing_had_happened

STEPS = ("--steps", "30")


def test_with_settle_a_kill_of_one_of_three_ranks_leaves_losses_bit_equal(new_job, uninterrupted):
    job = new_job().with_faults(kill(rank=2, at="snapshot.fill", step=16)).run("--settle", *STEPS, ranks=3)
    assert_as_if_nothing_had_happened(job, uninterrupted("--settle", *STEPS, ranks=3))
    assert job.resumes()[1:] == [(14, "memory")] or job.skips()


@pytest.mark.campaign
def test_without_settle_a_kill_of_one_of_three_ranks_changes_losses(new_job, uninterrupted):
    """Which is why there is settle: the first step after the restart sums in another order."""
    job = new_job().with_faults(kill(rank=2, at="snapshot.fill", step=16)).run(*STEPS, ranks=3)
    reference = uninterrupted(*STEPS, ranks=3)
    assert job.ends() != reference.ends()
    assert all(job.losses(0)[step] == reference.losses(0)[step] for step in range(1, 15))
