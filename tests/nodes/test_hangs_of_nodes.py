"""Hangs of jobs of three hosts, whose agents exchange stacks, also when the one that collects them is lost by then."""

import signal
import time

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.job import NodesJob
from tests.nodes.recovery import Line

pytestmark = pytest.mark.campaign
TIMEOUT = 5.0
ODD = "1 of 3 ranks, rank 2 on host node2, is stopped (SIGSTOP)"


def hanging(fleet: Fleet) -> NodesJob:
    """A job of which the worker of host 2 is stopped, as its agent is about to find."""
    flags = ("--fast-hang-timeout", str(TIMEOUT))
    job = fleet.started((0, 1, 2), "--memory", "5", nodes="2:3", stores=(0, 1, 2), flags=flags)
    job.cluster.hosts[2].kill(int(job.lines(2)[-1]["pid"]), signal.SIGSTOP)
    time.sleep(TIMEOUT - 0.7)
    return job


def told(job: NodesJob, number: int) -> list[Line]:
    return [line for line in job.events(number) if line["event"] in ("hang", "hang_elsewhere")]


def test_all_agents_name_the_host_of_the_rank_that_hangs(fleet: Fleet) -> None:
    job = hanging(fleet)
    job.recovered(time.monotonic())
    for number in range(3):
        assert ODD in job.output(number), job.output(number)
    found = [line for number in range(3) for line in told(job, number)]
    assert all([group["hosts"] for group in line["groups"]] == [["node2"], ["node0", "node1"]] for line in found)
    job.finish()


@pytest.mark.parametrize("how", ["lost", "killed", "stopped"])
def test_the_first_node_is_lost_or_stopped_while_it_is_asked_and_the_others_go_on(fleet: Fleet, how: str) -> None:
    job = hanging(fleet)
    since = {"lost": job.lose, "killed": job.kill_node, "stopped": job.freeze}[how](0)
    if how == "stopped":
        job.set_aside(0)
    assert sorted(job.recovered(since).ranks) == [1, 2]
    # The loss may end the round before the hang is found; if it does not, the hang ends it.
    ends = ("cannot get the stacks of other nodes from the first node", "rank 2 is stopped", "has ended", "is lost")
    assert any(words in job.output(number) for words in ends for number in (1, 2)), job.text()
    job.do_steps(5)
    if how == "stopped":
        job.count_on(0)
        job.recovered(job.thaw(0))
    job.finish()


def test_a_node_whose_agent_is_stopped_is_named_as_silent_by_the_others(fleet: Fleet) -> None:
    """The others still name the rank that hangs, which is elsewhere."""
    job = hanging(fleet)
    since = job.freeze(1)
    job.set_aside(1)
    assert sorted(job.recovered(since).ranks) == [0, 2]
    assert ODD in job.output(0) + job.output(2), job.text()
    job.do_steps(5)
    job.count_on(1)
    job.recovered(job.thaw(1))
    job.end()
