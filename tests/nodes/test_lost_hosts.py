"""Jobs that lose a host, its memory or its link, and what each loss may cost; test_restarts.py has the simplest."""

import os
import time

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.job import EVERY, NEVER, SOON
from tests.nodes.load import make_busy, obstacle_to_throttling, periods_throttled, throttled

pytestmark = pytest.mark.campaign
BATCHES = ("--batches", "2")

# --- a host lost with its memory, a fresh one in its place


def test_ddp_loses_only_steps_since_the_last_save_with_the_host_that_has_the_store(fleet: Fleet) -> None:
    job = fleet.started((0, 1), "--disk", NEVER, stores=(0, 1))
    recovery = job.replace(0, 0)
    assert recovery.tiers[1] == "memory" and recovery.lost <= EVERY and recovery.starts == {0: 1, 1: 1}
    fleet.finish(job, ranks=2)


@pytest.mark.parametrize("fresh", [0, 2, 3, 4, 6])
def test_survivors_of_three_hosts_resume_from_their_memory_wherever_the_fresh_one_sorts(
    fleet: Fleet, fresh: int
) -> None:
    job = fleet.started((1, 3, 5))
    recovery = job.replace(3, fresh)
    assert recovery.ranks == {1: 0, fresh: 1, 5: 2}
    assert (recovery.tiers[1], recovery.tiers[5]) == ("memory", "memory") and recovery.lost <= EVERY
    fleet.finish(job, ranks=3)


# --- fewer hosts, and more


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_job_goes_on_without_any_one_of_three_hosts(fleet: Fleet, lost: int) -> None:
    """Also without the one that has the store and rank 0."""
    job = fleet.started((0, 1, 2), nodes="2:3", stores=(0, 1, 2))
    recovery = job.recovered(job.lose(lost), SOON)
    assert set(recovery.tiers.values()) == {"memory"} and recovery.lost <= EVERY
    job.finish()


@pytest.mark.parametrize("lost", [0, 1])
def test_one_of_two_hosts_goes_on_when_the_other_is_lost(fleet: Fleet, lost: int) -> None:
    job = fleet.started((0, 1), *BATCHES, nodes="1:2", stores=(0, 1))
    recovery = job.recovered(job.lose(lost), SOON)
    assert recovery.tiers == {1 - lost: "memory"} and recovery.lost <= EVERY
    job.do_steps(5)
    recovery = job.recovered(job.add(lost), SOON)
    assert recovery.tiers[1 - lost] == "memory" and recovery.lost <= EVERY
    fleet.finish(job, ranks=1)


def test_with_default_options_one_host_goes_on_soon_after_the_processes_of_the_other_are_killed(fleet: Fleet) -> None:
    job = fleet.started((0, 1), *BATCHES, nodes="1:2")
    recovery = job.recovered(job.kill_node(1), SOON)
    assert recovery.tiers == {0: "memory"} and recovery.lost <= EVERY
    job.do_steps(20)  # the slots of the other are full of older saves
    recovery = job.recovered(job.launch(1), SOON)
    assert recovery.tiers == {0: "memory", 1: "peer"} and recovery.lost <= EVERY
    fleet.finish(job, ranks=1)


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


@pytest.mark.parametrize("timeout", ["2", "1"])
def test_busy_and_throttled_hosts_are_not_taken_for_lost_ones(fleet: Fleet, timeout: str) -> None:
    """64 ranks persist for an hour while more processes want cores than there are, and a host has a tenth of one."""
    if why := obstacle_to_throttling():
        pytest.skip(why)
    ranks = {0: 22, 1: 21, 2: 21}
    job = fleet.job(ranks, "--steps", "1000000", "--pace", "0.2", "--disk", "6", nodes="2:3", every=2)
    hosts = job.cluster.hosts
    for number, count in ranks.items():
        job.launch(number, flags=("--nproc-per-node", str(count), "--fast-node-timeout", timeout))
    job.do_steps(3, 600)
    for host in hosts.values():
        make_busy(host, os.cpu_count() or 1, job.out / "busy")
    end_of_test = time.monotonic() + float(os.environ.get("FASTCKPT_TEST_SECONDS", "3600"))
    with throttled(hosts[2], 0.1):
        while time.monotonic() < end_of_test:
            job.do_steps(1, 600)
            print(f"step {job.reached()}, throttled {periods_throttled(hosts[2])} times", flush=True)
    assert {number: job.starts(number) for number in hosts} == ranks
    assert "is lost:" not in job.text(1 << 30) and "no sign of life" not in job.text(1 << 30)
    job.end()
