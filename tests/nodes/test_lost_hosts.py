"""Jobs that lose a host, its memory or its link, and what each loss may cost."""

import os
import time
from collections.abc import Collection

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.hosts import Cluster
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.load import make_busy, obstacle_to_throttling, periods_throttled, throttled
from tests.nodes.recovery import Recovery
from tests.nodes.test_restarts import assert_bitwise, starts

EVERY = 10
"""Steps from one save in memory to the next: other hosts keep small files of it some tenths of a second later."""
NEVER = "100000"
"""An interval of saves to storage that no run is long enough for."""
SOON = 30.0
"""Seconds for what takes up to 4 on a quiet machine; one that waits for a timeout of torch's takes longer."""
campaign = pytest.mark.campaign


def started(
    cluster: Cluster, *script: str, nodes: str = "", meeting: str = "", flags: Collection[str] = ()
) -> NodesJob:
    """A job on all hosts that has done some steps."""
    job = NodesJob(
        cluster, "--memory", str(EVERY), *script, nodes=nodes or str(len(cluster.hosts)), meeting=meeting, flags=flags
    )
    job.launch(*cluster.hosts)
    job.do_steps(EVERY + 6)
    return job


def replace(job: NodesJob, lost: int, fresh: int) -> Recovery:
    """Lose a host, and have another come in its place."""
    at = job.lose(lost)
    job.cluster.add(fresh)
    job.launch(fresh)
    return job.recovered(at)


def end(job: NodesJob) -> None:
    job.do_steps(5)
    job.end()


# --- a host lost with its memory, a fresh one in its place


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=campaign)])
def test_ddp_loses_only_steps_since_the_last_save_in_memory_with_a_host(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, lost: int
) -> None:
    """Nothing is on storage yet, so nothing of it is read."""
    job = started(new_cluster(0, 1), "--disk", NEVER, meeting=endpoint(0, 1) if lost == 0 else "")
    recovery = replace(job, lost, lost)
    assert recovery.tiers[1 - lost] == "memory" and recovery.lost <= EVERY
    assert recovery.starts == {0: 1, 1: 1}
    end(job)
    assert_bitwise(job, uninterrupted(ranks=2))


@campaign
@pytest.mark.parametrize("fresh", [0, 2, 3, 4, 6])
def test_survivors_of_three_hosts_resume_from_their_memory_wherever_the_fresh_one_sorts(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, fresh: int
) -> None:
    job = started(new_cluster(1, 3, 5))
    recovery = replace(job, 3, fresh)
    assert recovery.ranks == {1: 0, fresh: 1, 5: 2}
    assert (recovery.tiers[1], recovery.tiers[5]) == ("memory", "memory") and recovery.lost <= EVERY
    end(job)
    assert_bitwise(job, uninterrupted(ranks=3))


# --- fewer hosts, and more


@campaign
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_job_goes_on_without_any_one_of_three_hosts(new_cluster: NewCluster, lost: int) -> None:
    """Also without the one that has the store and rank 0."""
    job = started(new_cluster(0, 1, 2), nodes="2:3", meeting=endpoint(0, 1, 2))
    recovery = job.recovered(job.lose(lost), SOON)
    assert set(recovery.tiers.values()) == {"memory"} and recovery.lost <= EVERY
    end(job)


@campaign
@pytest.mark.parametrize("lost", [0, 1])
def test_one_of_two_hosts_goes_on_when_the_other_is_lost(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, lost: int
) -> None:
    job = started(new_cluster(0, 1), "--batches", "2", nodes="1:2", meeting=endpoint(0, 1))
    recovery = job.recovered(job.lose(lost), SOON)
    assert recovery.tiers == {1 - lost: "memory"} and recovery.lost <= EVERY
    job.do_steps(5)
    job.cluster.add(lost)
    recovery = job.recovered(job.launch(lost), SOON)
    assert recovery.tiers[1 - lost] == "memory" and recovery.lost <= EVERY
    end(job)
    assert_bitwise(job, uninterrupted("--batches", "2", ranks=1))


@campaign
def test_with_default_options_one_host_goes_on_soon_after_the_processes_of_the_other_are_killed(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job = started(new_cluster(0, 1), "--batches", "2", nodes="1:2")
    recovery = job.recovered(job.kill_node(1), SOON)
    assert recovery.tiers == {0: "memory"} and recovery.lost <= EVERY
    job.do_steps(20)  # the slots of the other are full of older saves
    recovery = job.recovered(job.launch(1), SOON)
    assert recovery.tiers == {0: "memory", 1: "peer"} and recovery.lost <= EVERY
    end(job)
    assert_bitwise(job, uninterrupted("--batches", "2", ranks=1))


# --- a link that is down


@campaign
@pytest.mark.parametrize("has_carrier", [False, True])
def test_a_host_whose_link_stays_down_is_left_behind(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, has_carrier: bool
) -> None:
    """The timeout of collectives is half an hour."""
    job = started(new_cluster(0, 1), "--batches", "2", nodes="1:2")
    recovery = job.recovered(job.isolate(1, has_carrier=has_carrier), SOON)
    assert recovery.tiers == {0: "memory"} and recovery.lost <= EVERY
    end(job)
    assert_bitwise(job, uninterrupted("--batches", "2", ranks=1))


@campaign
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_link_down_for_five_seconds_counts_no_restart(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, nodes: str
) -> None:
    """None is allowed: one that counted would end the job."""
    job = started(new_cluster(0, 1), "--batches", "2", nodes=nodes, flags=("--max-restarts", "0"))
    job.cluster.hosts[1].unplug()
    time.sleep(5)
    job.cluster.hosts[1].plug()
    job.do_steps(2 * EVERY, SOON)
    end(job)
    assert_bitwise(job, uninterrupted("--batches", "2", ranks=1))


# --- a host that is slow, or stands still


@campaign
def test_a_host_whose_agent_is_stopped_is_left_behind_and_joins_when_it_is_continued(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    """Its workers train on as long as the others let them."""
    job = started(new_cluster(0, 1), "--batches", "2", nodes="1:2")
    at = job.freeze(1)
    stopped = job.agents.pop(1)
    assert job.recovered(at, SOON).lost <= EVERY
    job.do_steps(5)
    job.agents[1] = stopped
    recovery = job.recovered(job.thaw(1), SOON)
    assert recovery.tiers[0] == "memory" and recovery.lost <= EVERY
    end(job)
    assert_bitwise(job, uninterrupted("--batches", "2", ranks=1))


@campaign
@pytest.mark.parametrize("timeout", ["2", "1"])
def test_busy_and_throttled_hosts_are_not_taken_for_lost_ones(new_cluster: NewCluster, timeout: str) -> None:
    """64 ranks persist for an hour while more processes want cores than there are, and a host has a tenth of one."""
    if why := obstacle_to_throttling():
        pytest.skip(why)
    cluster = new_cluster(0, 1, 2)
    job = NodesJob(cluster, "--steps", "1000000", "--pace", "0.2", "--disk", "6", nodes="2:3")
    for number, ranks in ((0, 22), (1, 21), (2, 21)):
        job.launch(number, flags=("--nproc-per-node", str(ranks), "--fast-node-timeout", timeout))
    job.do_steps(3, 600)
    for host in cluster.hosts.values():
        make_busy(host, os.cpu_count() or 1, cluster.folder / "busy")
    end_of_test = time.monotonic() + float(os.environ.get("FASTCKPT_TEST_SECONDS", "3600"))
    with throttled(cluster.hosts[2], 0.1):
        while time.monotonic() < end_of_test:
            job.do_steps(1, 600)
            print(f"step {job.reached()}, throttled {periods_throttled(cluster.hosts[2])} times", flush=True)
    assert [starts(job, number) for number in cluster.hosts] == [22, 21, 21]
    assert "is lost:" not in job.text(1 << 30) and "no sign of life" not in job.text(1 << 30)
    job.end()
