"""Jobs with a spare host, as in docs/clusters/nodes.md: it takes the rank of one that is lost, or fails twice."""

import time
from collections.abc import Sequence

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import address_of
from tests.nodes.job import EVERY, PORT, SOON, NodesJob
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
def test_two_hosts_that_are_lost_at_once_are_replaced_by_two_spares(fleet: Fleet) -> None:
    job = fleet.with_spares(3, 2)
    lost = job.lose(1)
    job.lose(2)
    job.count_on(3)
    recovery = taken_over(job, lost, 4)
    assert recovery.ranks[0] == 0 and {recovery.ranks[3], recovery.ranks[4]} == {1, 2}
    assert recovery.tiers == {0: "memory", 3: "peer", 4: "peer"}
    fleet.finish(job, ranks=3)


def with_another_spare(fleet: Fleet, *script: str, stores: Sequence[int]) -> NodesJob:
    """A job of three hosts, one spare, and then one more."""
    job = fleet.with_spares(3, 1, *script, stores=stores)
    job.cluster.add(4)
    job.park(4)
    job.are_parked(4)
    return job


@campaign
def test_a_spare_that_does_not_reach_the_first_host_leaves_and_the_next_one_takes_over(fleet: Fleet) -> None:
    """The store is at host 2, the first rank at host 0."""
    job = with_another_spare(fleet, stores=(2, 0, 1))
    job.cluster.hosts[0].run("ip", "route", "add", "blackhole", f"{address_of(3)}/32")
    recovery = taken_over(job, job.lose(1), 4)
    assert recovery.ranks == {0: 0, 2: 2, 4: 1} and recovery.tiers == {0: "memory", 2: "memory", 4: "peer"}
    assert job.waiting[3].wait(60) != 0
    assert "does not reach the first of them, node0, at" in job.text(100_000)
    fleet.finish(job, ranks=3)


@campaign
def test_a_spare_that_the_others_do_not_reach_leaves_the_first_rank_to_the_next_one(fleet: Fleet) -> None:
    """The store is at host 1, the first rank at host 0."""
    job = with_another_spare(fleet, "--pace", "0.2", stores=(1, 2, 0))
    for number in (1, 2):
        to = ("ip", "rule", "add", "to", address_of(3))
        job.cluster.hosts[number].run(*to, "ipproto", "tcp", "sport", str(PORT), "lookup", "main", "prio", "100")
        job.cluster.hosts[number].run(*to, "blackhole", "prio", "200")  # all but answers of the store
    recovery = taken_over(job, job.lose(0), 4, 2 * SOON)
    assert recovery.ranks == {1: 1, 2: 2, 4: 0}
    assert job.waiting[3].wait(60) != 0
    assert f"the other nodes do not reach this one, the first of their round, at {address_of(3)}" in job.text(100_000)
    fleet.finish(job, ranks=3)


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


@campaign
@pytest.mark.parametrize("stores", [(0, 1, 2, 3), (0, 2, 3)], ids=["members first", "spares first"])
def test_spares_that_reach_the_next_store_first_wait_for_the_member_that_lives(
    fleet: Fleet, stores: Sequence[int]
) -> None:
    """They are as many as the job has nodes, and would begin it once more without the member and its memory."""
    job = fleet.with_spares(2, 2, stores=stores)
    lost = job.lose(0)
    number = job.until(lambda: next((each for each in job.waiting if job.lines(each)), 0), "a spare trains")
    recovery = taken_over(job, lost, number)
    assert recovery.ranks == {number: 0, 1: 1} and recovery.tiers == {number: "peer", 1: "memory"}
    job.do_steps(5)
    job.agents |= job.waiting
    job.end()
    fleet.compare(job, ranks=2)
