"""Hangs of jobs of three hosts, whose agents exchange stacks, also when the one that collects them is lost by then."""

import signal
import time

import pytest

from tests.nodes.conftest import NewCluster
from tests.nodes.hosts import name_of
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.test_halves import events, output

TIMEOUT = 5.0
ODD = "1 of 3 ranks, rank 2 on host node2, is stopped (SIGSTOP)"
campaign = pytest.mark.campaign


def hung(job: NodesJob, number: int) -> None:
    """Have the worker of a host be stopped, and wait until its agent is about to find that."""
    job.cluster.hosts[number].kill(int(job.lines(number)[-1]["pid"]), signal.SIGSTOP)
    time.sleep(TIMEOUT - 0.7)


def started(new_cluster: NewCluster) -> NodesJob:
    cluster = new_cluster(0, 1, 2)
    flags = ("--fast-hang-timeout", str(TIMEOUT))
    job = NodesJob(cluster, "--memory", "5", nodes="2:3", meeting=endpoint(0, 1, 2), flags=flags)
    job.launch(*cluster.hosts)
    job.do_steps(12)
    return job


def told(job: NodesJob, number: int) -> list:
    return [line for line in events(job, number) if line["event"] in ("hang", "hang_elsewhere")]


@campaign
def test_all_agents_name_the_host_of_the_rank_that_hangs(new_cluster: NewCluster) -> None:
    job = started(new_cluster)
    since = job.launch()
    hung(job, 2)
    job.recovered(since)
    for number in range(3):
        assert ODD in output(job, number), output(job, number)
    found = [line for number in range(3) for line in told(job, number)]
    assert all([group["hosts"] for group in line["groups"]] == [["node2"], ["node0", "node1"]] for line in found)
    print(sorted(line["asked"] for line in found if line["event"] == "hang"))
    job.do_steps(5)
    job.end()


@campaign
@pytest.mark.parametrize("how", ["lost", "killed", "stopped"])
def test_the_first_node_is_lost_or_stopped_while_it_is_asked_and_the_others_go_on(
    new_cluster: NewCluster, how: str
) -> None:
    job = started(new_cluster)
    hung(job, 2)
    since = {"lost": job.lose, "killed": job.kill_node, "stopped": job.freeze}[how](0)
    stopped = job.agents.pop(0, None)
    recovery = job.recovered(since)
    assert sorted(recovery.ranks) == [1, 2]
    # The loss may end the round before the hang is found; if it does not, the hang ends it.
    ends = ("cannot get the stacks of other nodes from the first node", "rank 2 is stopped", "has ended", "is lost")
    assert any(words in output(job, number) for words in ends for number in (1, 2)), job.text()
    print({name_of(number): [line["event"] for line in told(job, number)] for number in (1, 2)}, recovery.seconds)
    job.do_steps(5)
    if stopped is not None:
        job.agents[0] = stopped
        job.recovered(job.thaw(0))
        job.do_steps(5)
    job.end()


@campaign
def test_a_node_whose_agent_is_stopped_is_named_as_silent_by_the_others(new_cluster: NewCluster) -> None:
    """The others still name the rank that hangs, which is elsewhere."""
    job = started(new_cluster)
    hung(job, 2)
    since = job.freeze(1)
    stopped = job.agents.pop(1)
    recovery = job.recovered(since)
    assert sorted(recovery.ranks) == [0, 2]
    assert ODD in output(job, 0) + output(job, 2), job.text()
    job.do_steps(5)
    job.agents[1] = stopped
    job.recovered(job.thaw(1))
    job.end()
