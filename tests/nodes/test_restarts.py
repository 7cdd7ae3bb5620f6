"""Jobs of hosts through faults that leave each its memory: bitwise, from memory, one start a fault."""

import time
from collections.abc import Sequence

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.job import NEVER, NodesJob
from tests.nodes.recovery import Recovery

MEMORY = 2
"""Steps from a save in memory to the next here."""
campaign = pytest.mark.campaign


def assert_from_memory(recovery: Recovery, nodes: Sequence[int] = (0, 1)) -> None:
    """The workers of these nodes were started once, and no more was lost than since the last save."""
    assert recovery.starts == dict.fromkeys(nodes, 1)
    assert recovery.tiers == dict.fromkeys(nodes, "memory")
    assert recovery.lost <= MEMORY


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


def test_ddp_on_two_hosts_comes_back_from_memory_after_kills_of_workers_and_of_whole_hosts(fleet: Fleet) -> None:
    """Nothing is on storage, so nothing of it is read."""
    job = fleet.started((0, 1), "--disk", NEVER, every=MEMORY, steps=10)
    kill_workers(job)
    for number in (1, 0):  # the store of the last one is lost with it, and so is the secret that it had drawn
        kill_and_launch_again(job, number)
    assert [job.starts(number) for number in (0, 1)] == [5, 5]
    fleet.finish(job, ranks=2)
    assert "cannot be watched" not in job.text()


@campaign
def test_hosts_that_have_addresses_of_ipv6_alone_resume_from_memory(fleet: Fleet) -> None:
    job = NodesJob(fleet.new_cluster(0, 1, ipv6=True), nodes="2", meeting="[fd00::1]:29400")
    job.launch(0, 1)
    job.do_steps(10)
    kill_workers(job)
    kill_and_launch_again(job, 1)
    fleet.finish(job, ranks=2)
    assert "cannot be watched" not in job.text()


@campaign
def test_hosts_that_meet_by_given_ranks_resume_from_memory(fleet: Fleet) -> None:
    """By torch's static rendezvous, with FSDP2."""
    job = fleet.job((0, 1), "--way", "fsdp2", every=MEMORY, flags=("--rdzv-backend", "static"))
    for number in (0, 1):
        job.launch(number, flags=("--node-rank", str(number)))
    job.do_steps(10)
    kill_workers(job)
    fleet.finish(job, ranks=2)


def test_a_job_goes_on_on_one_host_and_again_on_two_and_a_link_down_for_a_second_costs_no_restart(fleet: Fleet) -> None:
    """Its steps take two batches on any number of hosts."""
    flags = ("--rdzv-conf", "last_call_timeout=2")
    job = fleet.started((0, 1), "--batches", "2", nodes="1:2", flags=flags, every=MEMORY, steps=10)
    host = job.cluster.hosts[1]
    for cut in (host.unplug, host.mute):
        cut()
        time.sleep(0.7)  # with the commands, about a second
        host.plug()
        job.do_steps(5)
    assert [job.starts(number) for number in (0, 1)] == [1, 1]
    assert_from_memory(job.recovered(job.kill_node(1)), [0])
    job.do_steps(10)
    joined = job.recovered(job.launch(1))
    assert joined.starts == {0: 1, 1: 1} and joined.lost <= MEMORY
    job.do_steps(10)
    fleet.finish(job, ranks=1)
