"""Jobs that lose a host, its memory or its link, and what each loss may cost; test_restarts.py has the simplest."""

import signal
import time

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.job import EVERY, SOON

pytestmark = pytest.mark.campaign
BATCHES = ("--batches", "2")

# --- a host lost with its memory, a fresh one in its place


@pytest.mark.parametrize("fresh", [0, 4, 6])
def test_survivors_of_three_hosts_resume_from_their_memory_wherever_the_fresh_one_sorts(
    fleet: Fleet, fresh: int
) -> None:
    job = fleet.started((1, 3, 5))
    recovery = job.replace(3, fresh)
    assert recovery.ranks == {1: 0, fresh: 1, 5: 2}
    assert (recovery.tiers[1], recovery.tiers[5]) == ("memory", "memory") and recovery.lost <= EVERY
    fleet.finish(job, ranks=3)


# --- fewer hosts, and more


# --- a link that is down


@pytest.mark.parametrize("has_carrier", [False, True])
def test_a_host_whose_link_stays_down_is_left_behind(fleet: Fleet, has_carrier: bool) -> None:
    """The timeout of collectives is half an hour."""
    job = fleet.started((0, 1), *BATCHES, nodes="1:2")
    recovery = job.recovered(job.isolate(1, has_carrier=has_carrier), SOON)
    assert recovery.tiers == {0: "memory"} and recovery.lost <= EVERY
    fleet.finish(job, ranks=1)


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_link_down_for_five_seconds_counts_no_restart(fleet: Fleet, nodes: str) -> None:
    """None is allowed: one that counted would end the job."""
    job = fleet.started((0, 1), *BATCHES, nodes=nodes, flags=("--max-restarts", "0"))
    job.cluster.hosts[1].unplug()
    time.sleep(5)
    job.cluster.hosts[1].plug()
    job.do_steps(2 * EVERY, SOON)
    fleet.finish(job, ranks=1)


# --- a host that is slow, or stands still


def test_a_host_whose_agent_is_stopped_is_left_behind_and_joins_when_it_is_continued(fleet: Fleet) -> None:
    """Its workers train on as long as the others let them."""
    job = fleet.started((0, 1), *BATCHES, nodes="1:2")
    at = job.freeze(1)
    job.set_aside(1)
    assert job.recovered(at, SOON).lost <= EVERY
    job.do_steps(5)
    job.count_on(1)
    recovery = job.recovered(job.thaw(1), SOON)
    assert recovery.tiers[0] == "memory" and recovery.lost <= EVERY
    fleet.finish(job, ranks=1)


def test_a_rank_that_hangs_is_named_by_all_agents_and_ends_also_when_the_first_agent_is_stopped(fleet: Fleet) -> None:
    """Which collects the stacks of all: the others go on without it."""
    job = fleet.started((0, 1, 2), nodes="2:3", stores=(0, 1, 2), flags=("--fast-hang-timeout", "5"), every=5)

    def hang() -> None:
        job.cluster.hosts[2].kill(int(job.lines(2)[-1]["pid"]), signal.SIGSTOP)

    hang()
    job.recovered(time.monotonic())
    odd = "1 of 3 ranks, rank 2 on host node2, is stopped (SIGSTOP)"
    assert all(odd in job.output(number) for number in range(3)), job.text()
    job.do_steps(5)
    hang()
    time.sleep(4.3)
    since = job.freeze(0)
    job.set_aside(0)
    assert sorted(job.recovered(since).ranks) == [1, 2]
    job.do_steps(5)
    job.count_on(0)
    job.recovered(job.thaw(0))
    job.finish()
