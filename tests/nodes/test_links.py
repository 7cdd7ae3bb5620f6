"""Hosts that reach all others but each other: one of the two leaves where a spare waits, and comes back."""

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import Cluster, address_of
from tests.nodes.job import EVERY, SOON

campaign = pytest.mark.campaign
NOWHERE = "02:00:00:00:00:99"
"""The address of no interface."""


def cut(cluster: Cluster, *pair: int) -> None:
    """Lose all that one of two hosts sends to the other; the rest of the network does not change."""
    for own, other in (pair, pair[::-1]):
        cluster.hosts[own].run("ip", "neigh", "replace", address_of(other), "lladdr", NOWHERE, "dev", "eth0")


def mend(cluster: Cluster, *pair: int) -> None:
    for own, other in (pair, pair[::-1]):
        cluster.hosts[own].run("ip", "neigh", "delete", address_of(other), "dev", "eth0")


def shrink(cluster: Cluster, number: int, size: int) -> None:
    """Lose all packets to and from a host that are larger, as a switch does between hosts with jumbo frames."""
    for each in cluster.hosts.values():
        each.run("ip", "link", "set", "eth0", "gso_max_segs", "1")  # a host hands over several packets as one, else
    host = cluster.hosts[number]
    host._switch.run("ip", "link", "set", host.port, "mtu", str(size))


FLAGS = ("--fast-metrics-port", "9400")


@pytest.mark.parametrize("flags", [("--fast-hang-timeout", "15"), pytest.param((), marks=campaign)])
def test_of_two_hosts_without_a_link_one_leaves_for_a_spare(fleet: Fleet, flags: tuple[str, ...]) -> None:
    job = fleet.with_spares(3, 1, flags=(*FLAGS, *flags))
    cut(job.cluster, 1, 2)
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
    mend(job.cluster, 1, 2)
    lost = job.lose(1)
    job.count_on(2)
    assert set(job.recovered(lost, SOON).ranks) == {0, 2, 3}
    fleet.finish(job, ranks=3)


@campaign
def test_a_host_whose_link_drops_large_packets_stays_while_its_workers_go_on(fleet: Fleet) -> None:
    """Their gradients fit in small ones."""
    job = fleet.with_spares(3, 1, "--pace", "0.2", flags=FLAGS)
    shrink(job.cluster, 1, 600)
    job.until(lambda: "does not hear node1, though they answer" in job.output(0), "the link is named")
    job.do_steps(50)
    shrink(job.cluster, 1, 1500)
    job.until(lambda: "this node receives messages from node1 again" in job.output(0), "the link is mended")
    job.finish()
    assert "it leaves" not in job.text() and "resumed" not in job.text()
