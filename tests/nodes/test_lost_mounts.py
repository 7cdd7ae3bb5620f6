"""A host on which another directory shows in the place of the checkpoint directory: its mount is lost."""

import pytest

from tests.nodes.conftest import Fleet


@pytest.mark.campaign
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
