"""Hosts on which another directory shows in the place of the checkpoint directory: its mount is lost."""

from pathlib import Path

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import Host
from tests.nodes.job import DEADLINE, LAST_CALL, NodesJob

SAVES = ("--memory", "5", "--disk", "10")


def durable(job: NodesJob) -> int:
    """The newest step of which all parts are on the storage of the hosts."""
    found = job.cluster.storage.glob("checkpoint-*/manifest.json")
    return max((int(path.parent.name.partition("-")[2]) for path in found), default=0)


def becomes_durable(job: NodesJob) -> None:
    at = durable(job)
    job.until(lambda: durable(job) > at, "another checkpoint is durable")


def lose_mount(job: NodesJob, number: int) -> tuple[Host, Path]:
    """Have an empty directory show there, as when a mount is lost: the host, and that directory."""
    empty, host = job.cluster.folder / f"empty.{number}", job.cluster.hosts[number]
    empty.mkdir()
    host.run("mount", "--bind", str(empty), str(job.cluster.storage))
    return host, empty


def test_a_host_that_loses_its_mount_writes_nothing_and_goes_on_when_it_has_it_again(fleet: Fleet) -> None:
    job = fleet.started((0, 1), *SAVES)
    host, empty = lose_mount(job, 1)
    says = f"{job.cluster.storage} on node1 is not the directory any more in which this job has saved: it has no"
    job.until(lambda: says in job.output(1), "host 1 says that its mount is lost", 30)
    assert "(FC-049, " in job.output(1)
    # A restart goes on from memory, and writes there no more than before.
    assert job.recovered(job.kill_worker(1)).tiers == {0: "memory", 1: "memory"}
    job.do_steps(12)
    assert not list(empty.iterdir())
    host.run("umount", str(job.cluster.storage))
    becomes_durable(job)
    fleet.finish(job, ranks=2)


@pytest.mark.campaign
def test_a_host_that_is_started_again_without_its_mount_is_left_out_until_it_has_it(fleet: Fleet) -> None:
    """Its memory stays, and the others go on."""
    job = fleet.started((0, 1, 2), *SAVES, nodes="2:3", flags=LAST_CALL)
    job.recovered(job.kill_node(1))
    host, empty = lose_mount(job, 1)
    job.launch(1)
    assert job.agents.pop(1).wait(DEADLINE) == 2, job.text()
    said = job.output(1)
    assert f"{job.cluster.storage} is not the checkpoint directory of the job on this node: mount there" in said
    assert "discarding" not in said and not list(empty.iterdir())
    becomes_durable(job)
    host.run("umount", str(job.cluster.storage))
    job.recovered(job.launch(1))
    job.finish()
