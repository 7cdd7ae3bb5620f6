"""Jobs that lose a host, its memory, mount or link, and what each loss may cost; test_restarts.py has the simplest."""

import signal
import time

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import address_of
from tests.nodes.job import DEADLINE, EVERY, SOON

pytestmark = pytest.mark.campaign
BATCHES = ("--batches", "2")
NOWHERE = "02:00:00:00:00:99"
"""The address of no interface."""
SLOW_LINK = "tc qdisc add dev eth0 root tbf rate 512kbit burst 8kb latency 500ms"
"""Messages of the rendezvous pass; a MiB takes longer than an exchange may."""

# --- a link that is down


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


# --- parts of the network, and a mount


def test_of_two_hosts_without_a_link_one_leaves_for_a_spare_and_comes_back(fleet: Fleet) -> None:
    job = fleet.with_spares(3, 1, flags=("--fast-metrics-port", "9400", "--fast-hang-timeout", "15"))
    hosts = job.cluster.hosts
    for own, other in ((1, 2), (2, 1)):  # all that one sends to the other is lost; the rest of the network is well
        hosts[own].run("ip", "neigh", "replace", address_of(other), "lladdr", NOWHERE, "dev", "eth0")
    since = job.set_aside(2)
    job.count_on(3)
    recovery = job.recovered(since, 4 * SOON)
    assert recovery.ranks == {0: 0, 1: 1, 3: 2} and recovery.lost <= EVERY
    job.do_steps(5)
    assert "node2 does not hear another node: it leaves (FC-051" in job.output(0)
    assert "host node2 and node1 do not reach each other: the job goes on without it, on 3 nodes" in job.text()
    assert "this node does not hear node2, though they answer" in job.output(1)
    assert "this host is drained, as it and node1 do not reach each other" in job.output(2)
    assert job.waiting[2].poll() is None

    # Without the other one it takes part.
    for own, other in ((1, 2), (2, 1)):
        hosts[own].run("ip", "neigh", "delete", address_of(other), "dev", "eth0")
    lost = job.lose(1)
    job.count_on(2)
    assert set(job.recovered(lost, SOON).ranks) == {0, 2, 3}
    fleet.finish(job, ranks=3)


def test_a_host_whose_link_carries_no_data_leaves_and_the_others_train(fleet: Fleet) -> None:
    job = fleet.job((0, 1, 2), nodes="2:3", flags=("--fast-node-check",))
    for number in (0, 1, 2):
        job.launch(number, flags=(f"--fast-events={job.out}/events.{number}",))
    job.cluster.hosts[2].run(*SLOW_LINK.split())
    assert job.agents.pop(2).wait(DEADLINE) == 76, job.text()
    # Its signs of life take the same link: the others may lose it before it is judged.
    assert "node2 failed the node check, and takes no part in the job: problem: pair: " in job.output(2)
    assert "Traceback" not in job.output(2)
    job.finish()
    rounds = [event for event in job.reported(0, "node_check") if event["occasion"] == "round"]
    assert rounds and rounds[-1]["verdict"] == "ok"


def test_a_host_that_loses_its_mount_writes_nothing_and_goes_on_when_it_has_it_again(fleet: Fleet) -> None:
    job = fleet.started((0, 1), "--memory", "5", "--disk", "10")
    storage, empty, host = job.cluster.storage, job.cluster.folder / "empty", job.cluster.hosts[1]

    def durable() -> int:
        """How many checkpoints all parts of are on the storage of the hosts."""
        return len([*storage.glob("checkpoint-*/manifest.json")])

    empty.mkdir()
    host.run("mount", "--bind", str(empty), str(storage))
    says = f"{storage} on node1 is not the directory any more in which this job has saved: it has no"
    job.until(lambda: says in job.output(1), "host 1 says that its mount is lost", 30)
    assert "(FC-049, " in job.output(1)
    # A restart goes on from memory, and writes there no more than before.
    assert job.recovered(job.kill_worker(1)).tiers == {0: "memory", 1: "memory"}
    job.do_steps(12)
    assert not list(empty.iterdir())
    at = durable()
    host.run("umount", str(storage))
    job.until(lambda: durable() > at, "another checkpoint is durable")
    fleet.finish(job, ranks=2)
