"""Jobs with a spare host, as in docs/clusters/nodes.md: it takes the rank of one that is lost, or fails twice."""

import time

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.job import EVERY, SOON, NodesJob
from tests.nodes.recovery import Recovery

campaign = pytest.mark.campaign


def taken_over(job: NodesJob, at: float, number: int, seconds: float = SOON) -> Recovery:
    """Wait until a spare trains, since a host was lost."""
    job.count_on(number)
    recovery = job.recovered(at, seconds)
    assert number in recovery.ranks and recovery.lost <= EVERY
    return recovery


def test_a_spare_takes_the_rank_of_a_host_that_failed_twice_and_gives_it_back_when_it_is_lost(fleet: Fleet) -> None:
    job = fleet.with_spares(2, 1)

    # A host that fails for the second time gives its place to the spare, and waits itself.
    first = job.recovered(job.kill_worker(1), SOON)
    assert (first.ranks, first.starts) == ({0: 0, 1: 1}, {0: 1, 1: 1})
    job.do_steps(5)
    killed = job.kill_worker(1)
    job.set_aside(1)
    recovery = taken_over(job, killed, 2)
    assert recovery.ranks == {0: 0, 2: 1} and recovery.starts == {0: 1, 2: 1}
    assert recovery.tiers == {0: "memory", 2: "peer"}
    said = "host node1 is left out while a spare waits: it failed 2 times, and no other for the same cause"
    assert said in job.text()
    job.do_steps(5)

    # When the spare is lost with its memory, nobody else is left.
    recovery = taken_over(job, job.lose(2), 1)
    assert recovery.ranks == {0: 0, 1: 1} and recovery.tiers[0] == "memory"
    fleet.finish(job, ranks=2)


@campaign
@pytest.mark.parametrize("seconds", [None, 0.0, 0.4, 0.8, 1.2])
def test_when_a_spare_dies_while_it_waits_or_takes_over_the_next_one_takes_over(
    fleet: Fleet, seconds: float | None
) -> None:
    """Seconds from the loss of a member to the death of the spare; none: it dies just before."""
    job = fleet.with_spares(2, 2)
    job.count_on(2)
    if seconds is None:
        job.kill_node(2)
    lost = job.lose(1)
    if seconds is not None:
        time.sleep(seconds)
        job.kill_node(2)
    recovery = taken_over(job, lost, 3)
    assert recovery.ranks == {0: 0, 3: 1} and recovery.tiers == {0: "memory", 3: "peer"}
    fleet.finish(job, ranks=2)
