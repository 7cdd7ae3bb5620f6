"""Jobs of two hosts through faults that leave each host its memory: bitwise, from memory, one start a fault."""

import importlib.util
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.job import NodesJob
from tests.nodes.recovery import Losses, Recovery

MEMORY = 2
"""Steps from a save in memory to the next, by default."""


def assert_bitwise(job: NodesJob, reference: Losses) -> None:
    """Each step was done, and had the losses of a run that nothing befell each time that it was done."""
    expected = {place: losses for place, losses in reference.items() if place[0] <= job.reached()}
    assert job.losses() == expected


def assert_from_memory(recovery: Recovery, nodes: Sequence[int] = (0, 1)) -> None:
    """The workers of these nodes were started once, and no more was lost than since the last save."""
    assert recovery.starts == dict.fromkeys(nodes, 1)
    assert recovery.tiers == dict.fromkeys(nodes, "memory")
    assert recovery.lost <= MEMORY


def starts(job: NodesJob, number: int) -> int:
    """How many workers a host has had."""
    return sum(line["what"] == "started" for line in job.lines(number))


def kill_workers(job: NodesJob) -> None:
    """Of the host without the store, then of the host that has it."""
    for number in (1, 0):
        assert_from_memory(job.recovered(job.kill_worker(number)))
        job.do_steps(5)


def kill_and_launch_again(job: NodesJob, number: int) -> None:
    """Kill all processes of a host, whose memory stays, and start its agent again."""
    killed = job.kill_node(number)
    job.launch(number)
    assert_from_memory(job.recovered(killed))
    job.do_steps(5)


def test_ddp_on_two_hosts_resumes_from_memory_after_a_worker_or_all_processes_of_a_host_are_killed(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job = NodesJob(new_cluster(0, 1), nodes="2")
    job.launch(0, 1)
    job.do_steps(10)
    kill_workers(job)
    for number in (1, 0):  # the store of the last one is lost with it, and so is the secret that it had drawn
        kill_and_launch_again(job, number)
    job.end()
    assert [starts(job, number) for number in (0, 1)] == [5, 5]
    assert "cannot be watched" not in job.text()
    assert_bitwise(job, uninterrupted(ranks=2))


def test_fsdp_on_two_hosts_resumes_from_memory_and_a_link_down_for_a_second_costs_no_restart(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    cluster = new_cluster(0, 1)
    job = NodesJob(cluster, "--way", "fsdp2", nodes="2")
    job.launch(0, 1)
    job.do_steps(10)
    kill_workers(job)
    for cut in (cluster.hosts[1].unplug, cluster.hosts[1].mute):
        cut()
        time.sleep(0.7)  # with the commands, about a second
        cluster.hosts[1].plug()
        job.do_steps(5)
    job.end()
    assert [starts(job, number) for number in (0, 1)] == [3, 3]
    assert_bitwise(job, uninterrupted("--way", "fsdp2", ranks=2))


@pytest.mark.campaign
@pytest.mark.parametrize(("way", "count"), [("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)])
def test_hosts_resume_from_memory_after_each_of_many_faults(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, way: str, count: int
) -> None:
    """Each host in turn; but the store's host loses its worker alone."""
    job = NodesJob(new_cluster(*range(count)), "--way", way, nodes=str(count))
    job.launch(*range(count))
    nodes = range(count)
    for turn in range(5):
        for number in nodes:
            job.do_steps(5)
            if number and turn % 2:
                killed = job.kill_node(number)
                job.launch(number)
            else:
                killed = job.kill_worker(number)
            assert_from_memory(job.recovered(killed), nodes)
    job.end()
    assert_bitwise(job, uninterrupted("--way", way, ranks=count))


@pytest.mark.parametrize("meeting", ["node0:29400", "[fd00::1]:29400"], ids=["name", "address"])
def test_hosts_that_have_addresses_of_ipv6_alone_resume_from_memory(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, meeting: str
) -> None:
    job = NodesJob(new_cluster(0, 1, ipv6=True), nodes="2", meeting=meeting)
    job.launch(0, 1)
    job.do_steps(10)
    kill_workers(job)
    kill_and_launch_again(job, 1)
    job.end()
    assert "cannot be watched" not in job.text()
    assert_bitwise(job, uninterrupted(ranks=2))


def test_of_more_agents_than_places_those_that_had_one_restart_and_another_takes_that_of_a_lost_host(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    """Two wait, without --fast-spares: neither a restart nor the loss of one of them is of any concern to the job."""
    job = NodesJob(new_cluster(0, 1, 2, 3), nodes="2")
    job.launch(0, 1)
    job.do_steps(10)
    job.launch(2, 3)
    waiting = {number: job.agents.pop(number) for number in (2, 3)}
    job.until(lambda: job.text(100_000).count("this one waits for a place") == 2, "two wait for a place")
    kill_workers(job)
    assert job.text(100_000).count("this one waits for a place") >= 2 and not job.lines(2) and not job.lines(3)
    lost = job.lose(1)
    recovered = job.until(lambda: [number for number in waiting if job.lines(number)], "another takes the place")
    assert len(recovered) == 1
    job.agents[recovered[0]] = waiting.pop(recovered[0])
    recovery = job.recovered(lost)
    assert recovery.ranks == {0: 0, recovered[0]: 1} and recovery.lost <= MEMORY
    job.do_steps(5)
    job.end()
    assert [agent.wait(60) for agent in waiting.values()] == [0], job.text()
    assert_bitwise(job, uninterrupted(ranks=2))


@pytest.mark.campaign
def test_hosts_that_meet_by_given_ranks_resume_from_memory(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    """By torch's static rendezvous."""
    job = NodesJob(new_cluster(0, 1), nodes="2", flags=("--rdzv-backend", "static"))
    for number in (0, 1):
        job.launch(number, flags=("--node-rank", str(number)))
    job.do_steps(10)
    kill_workers(job)
    job.end()
    assert_bitwise(job, uninterrupted(ranks=2))


@pytest.mark.campaign
def test_hosts_that_meet_by_etcd_resume_from_memory(new_cluster: NewCluster, uninterrupted: Uninterrupted) -> None:
    """By torch's rendezvous over the second version of etcd's interface, which a third host serves."""
    package = importlib.util.find_spec("etcd")
    if shutil.which("etcd") is None or package is None or package.origin is None:
        pytest.skip("needs etcd (Debian's etcd-server) and the package python-etcd")
    cluster = new_cluster(0, 1, 2)
    place, data = "http://node2:2379", str(cluster.folder / "etcd")
    urls = ["--listen-client-urls", "http://0.0.0.0:2379", "--advertise-client-urls", place]
    command = ["etcd", "--enable-v2", "--data-dir", data, *urls]
    cluster.hosts[2].start("-c", f"import os; os.execvp('etcd', {command})", output=cluster.folder / "etcd.log")
    flags = ("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "node2:2379", "--rdzv-conf", "protocol=http")
    job = NodesJob(cluster, nodes="2", flags=flags)
    job.launch(0, 1, PYTHONPATH=str(Path(package.origin).parents[1]))
    job.do_steps(10)
    kill_workers(job)
    job.end()
    assert_bitwise(job, uninterrupted(ranks=2))


def test_a_job_goes_on_on_one_host_and_again_on_two(new_cluster: NewCluster, uninterrupted: Uninterrupted) -> None:
    """Its steps take two batches on any number of hosts."""
    job = NodesJob(new_cluster(0, 1), "--batches", "2", nodes="1:2", flags=("--rdzv-conf", "last_call_timeout=2"))
    job.launch(0, 1)
    job.do_steps(10)
    assert_from_memory(job.recovered(job.kill_node(1)), [0])
    job.do_steps(10)
    joined = job.recovered(job.launch(1))
    assert joined.starts == {0: 1, 1: 1} and joined.lost <= MEMORY
    job.do_steps(10)
    job.end()
    assert_bitwise(job, uninterrupted("--batches", "2", ranks=1))


def test_hosts_with_checkpoint_directories_of_their_own_are_refused_by_name(new_cluster: NewCluster) -> None:
    job = NodesJob(new_cluster(0, 1, shares_storage=False), nodes="2", flags=("--fast-max-stalls", "1"))
    job.launch(0, 1)
    assert all(agent.wait(60) for agent in job.agents.values())
    assert job.reached() == 0
    text = job.text(10_000)
    assert f"ConfigError: {job.cluster.storage} is not the same directory on all nodes: " in text
    assert "nodes 0 (node0) have one; nodes 1 (node1)" in text
