"""Jobs with a spare host, as in docs/clusters/nodes.md: it takes the rank of one that is lost, or fails twice."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.hosts import address_of
from tests.nodes.job import PORT, NodesJob, endpoint
from tests.nodes.test_lost_hosts import EVERY, SOON, campaign
from tests.nodes.test_restarts import assert_bitwise
from tests.support.json_lines import whole_lines


def test_a_spare_takes_the_rank_of_a_host_that_failed_twice_and_gives_it_back_when_it_is_lost(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job, waiting = started(new_cluster, 2, 1)

    # A host that fails for the second time gives its place to the spare, and waits itself.
    first = job.recovered(job.kill_worker(1), SOON)
    assert (first.ranks, first.starts) == ({0: 0, 1: 1}, {0: 1, 1: 1})
    job.do_steps(5)
    killed = job.kill_worker(1)
    bad, job.agents[2] = job.agents.pop(1), waiting[2]
    recovery = job.recovered(killed, SOON)
    assert recovery.ranks == {0: 0, 2: 1} and recovery.starts == {0: 1, 2: 1}
    assert recovery.tiers == {0: "memory", 2: "peer"} and recovery.lost <= EVERY
    assert (
        "host node1 is left out while a spare waits: it failed 2 times, and no other for the same cause" in job.text()
    )
    job.do_steps(5)

    # When the spare is lost with its memory, nobody else is left.
    lost = job.lose(2)
    job.agents[1] = bad
    recovery = job.recovered(lost, SOON)
    assert recovery.ranks == {0: 0, 1: 1} and recovery.tiers[0] == "memory" and recovery.lost <= EVERY
    job.do_steps(5)
    job.end()
    assert_bitwise(job, uninterrupted(ranks=2))


def started(
    new_cluster: NewCluster,
    nodes: int,
    spares: int,
    endpoints: Sequence[int] = (),
    script: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> tuple[NodesJob, dict[int, subprocess.Popen[bytes]]]:
    """A job that has done some steps, and the agents of its spares, which wait."""
    cluster = new_cluster(*range(nodes + spares))
    flags = ("--fast-spares", str(spares), *flags)
    meeting = endpoint(*(endpoints or range(nodes + spares)))
    job = NodesJob(cluster, "--memory", str(EVERY), *script, nodes=str(nodes), meeting=meeting, flags=flags)
    job.launch(*range(nodes))
    events = {number: cluster.folder / f"events.{number}" for number in range(nodes, nodes + spares)}
    job.do_steps(1)
    for number, path in events.items():
        job.launch(number, flags=("--fast-events", str(path)))
    waiting = {number: job.agents.pop(number) for number in events}
    job.until(lambda: all(map(_waits, events.values())), "the spares wait")
    job.do_steps(EVERY + 6)
    return job, waiting


def _waits(events: Path) -> bool:
    return any(line["event"] == "waits_as_spare" for line in whole_lines(events))


@campaign
def test_two_hosts_that_are_lost_at_once_are_replaced_by_two_spares(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job, waiting = started(new_cluster, 3, 2)
    lost = job.lose(1)
    job.lose(2)
    job.agents |= waiting
    recovery = job.recovered(lost, SOON)
    assert recovery.ranks[0] == 0 and {recovery.ranks[3], recovery.ranks[4]} == {1, 2} and recovery.lost <= EVERY
    assert recovery.tiers == {0: "memory", 3: "peer", 4: "peer"}
    job.do_steps(5)
    job.end()
    assert_bitwise(job, uninterrupted(ranks=3))


@campaign
def test_a_spare_that_does_not_reach_the_first_host_leaves_and_the_next_one_takes_over(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job, waiting = started(new_cluster, 3, 1, endpoints=(2, 0, 1))  # the store is at host 2, the first rank at host 0
    job.cluster.add(4)
    later = job.cluster.folder / "events.4"
    job.launch(4, flags=("--fast-events", str(later)))
    waiting[4] = job.agents.pop(4)
    job.until(lambda: _waits(later), "the second spare waits")
    job.cluster.hosts[0].run("ip", "route", "add", "blackhole", f"{address_of(3)}/32")
    lost = job.lose(1)
    job.agents[4] = waiting[4]
    recovery = job.recovered(lost, SOON)
    assert recovery.ranks == {0: 0, 2: 2, 4: 1} and recovery.lost <= EVERY
    assert recovery.tiers == {0: "memory", 2: "memory", 4: "peer"}
    assert waiting[3].wait(60) != 0
    assert "does not reach the first of them, node0, at" in job.text(100_000)
    job.do_steps(5)
    job.end()
    assert_bitwise(job, uninterrupted(ranks=3))


@campaign
def test_a_spare_that_the_others_do_not_reach_leaves_the_first_rank_to_the_next_one(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    # The store is at host 1, the first rank at host 0.
    job, waiting = started(new_cluster, 3, 1, endpoints=(1, 2, 0), script=("--pace", "0.2"))
    job.cluster.add(4)
    later = job.cluster.folder / "events.4"
    job.launch(4, flags=("--fast-events", str(later)))
    waiting[4] = job.agents.pop(4)
    job.until(lambda: _waits(later), "the second spare waits")
    for number in (1, 2):
        to = ("ip", "rule", "add", "to", address_of(3))
        job.cluster.hosts[number].run(*to, "ipproto", "tcp", "sport", str(PORT), "lookup", "main", "prio", "100")
        job.cluster.hosts[number].run(*to, "blackhole", "prio", "200")  # all but answers of the store
    lost = job.lose(0)
    job.agents[4] = waiting[4]
    recovery = job.recovered(lost, 2 * SOON)
    assert recovery.ranks == {1: 1, 2: 2, 4: 0} and recovery.lost <= EVERY
    assert waiting[3].wait(60) != 0
    assert f"the other nodes do not reach this one, the first of their round, at {address_of(3)}" in job.text(100_000)
    job.do_steps(5)
    job.end()
    assert_bitwise(job, uninterrupted(ranks=3))


@campaign
@pytest.mark.parametrize("seconds", [None, 0.0, 0.4, 0.8, 1.2])
def test_when_a_spare_dies_while_it_waits_or_takes_over_the_next_one_takes_over(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, seconds: float | None
) -> None:
    """Seconds from the loss of a member to the death of the spare; none: it dies just before."""
    job, waiting = started(new_cluster, 2, 2)
    job.agents[2] = waiting[2]
    if seconds is None:
        job.kill_node(2)
    lost = job.lose(1)
    if seconds is not None:
        time.sleep(seconds)
        job.kill_node(2)
    job.agents[3] = waiting[3]
    recovery = job.recovered(lost, SOON)
    assert recovery.ranks == {0: 0, 3: 1} and recovery.tiers == {0: "memory", 3: "peer"} and recovery.lost <= EVERY
    job.do_steps(5)
    job.end()
    assert_bitwise(job, uninterrupted(ranks=2))


@campaign
@pytest.mark.parametrize("endpoints", [(0, 1, 2, 3), (0, 2, 3)], ids=["members first", "spares first"])
def test_spares_that_reach_the_next_store_first_wait_for_the_member_that_lives(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, endpoints: Sequence[int]
) -> None:
    """They are as many as the job has nodes, and would begin it once more without the member and its memory."""
    job, waiting = started(new_cluster, 2, 2, endpoints)
    lost = job.lose(0)
    number = job.until(lambda: next((number for number in waiting if job.lines(number)), 0), "a spare trains")
    job.agents[number] = waiting.pop(number)
    recovery = job.recovered(lost)
    assert recovery.ranks == {number: 0, 1: 1} and recovery.tiers == {number: "peer", 1: "memory"}
    assert recovery.lost <= EVERY
    job.do_steps(5)
    job.agents |= waiting
    job.end()
    assert_bitwise(job, uninterrupted(ranks=2))
