"""Hosts that reach all others but each other: one of the two leaves where a spare waits, and comes back."""

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import address_of
from tests.nodes.job import EVERY, SOON

NOWHERE = "02:00:00:00:00:99"
"""The address of no interface."""


@pytest.mark.campaign
@pytest.mark.parametrize("flags", [("--fast-hang-timeout", "15")])
def test_of_two_hosts_without_a_link_one_leaves_for_a_spare(fleet: Fleet, flags: tuple[str, ...]) -> None:
    job = fleet.with_spares(3, 1, flags=("--fast-metrics-port", "9400", *flags))
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
