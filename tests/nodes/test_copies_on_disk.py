"""Hosts that keep the shards of others on a disk of their own, and not in memory."""

import re
import shutil
from pathlib import Path

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.hosts import Cluster, name_of
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.recovery import Recovery
from tests.nodes.test_lost_hosts import EVERY, NEVER, campaign, end
from tests.nodes.test_restarts import assert_bitwise

WIDE = ("--way", "fsdp2", "--width", "300000", "--steps", "100", "--disk", NEVER)
"""A host's shards have 25 MB, and parity of three hosts half of that."""
LARGE = "+8M"


def on_disk(cluster: Cluster, number: int) -> tuple[str, str]:
    """The option of a host, whose directory is made."""
    disk_of(cluster, number).mkdir(exist_ok=True)
    return "--fast-replica-medium", f"disk:{disk_of(cluster, number)}"


def disk_of(cluster: Cluster, number: int) -> Path:
    return cluster.folder / f"nvme-{name_of(number)}"


def started(cluster: Cluster, *script: str, replicas: str, in_memory: int = -1) -> NodesJob:
    """A job that has made copies, on the disks of all hosts but for one."""
    numbers = [*cluster.hosts]
    flags = ("--fast-replicas", replicas)
    saves = ("--memory", str(EVERY))
    job = NodesJob(cluster, *saves, *script, nodes=str(len(numbers)), meeting=endpoint(*numbers), flags=flags)
    for number in numbers:
        job.launch(number, flags=() if number == in_memory else on_disk(cluster, number))
    job.do_steps(2 * EVERY + 6)
    return job


def replace(job: NodesJob, lost: int, fresh: int) -> Recovery:
    at = job.lose(lost)
    job.cluster.add(fresh)
    job.launch(fresh, flags=on_disk(job.cluster, fresh))
    return job.recovered(at)


def large_files(job: NodesJob, number: int) -> tuple[list[str], list[str]]:
    """Large files of others in the memory of a host, and on its disk."""

    def found(folder: str) -> list[str]:
        here = job.cluster.hosts[number].run("find", folder, "-type", "f", "-size", LARGE)
        return [path for path in here.splitlines() if "/kept/" in path or "/parity/" in path]

    disk = disk_of(job.cluster, number)
    return found("/dev/shm"), found(str(disk)) if disk.exists() else []


@campaign
@pytest.mark.parametrize("replicas", ["1", "xor:3"])
def test_shards_of_a_lost_host_come_from_the_disk_of_others(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, replicas: str
) -> None:
    job = started(new_cluster(0, 1, 2), *WIDE, replicas=replicas)
    for number in job.cluster.hosts:
        in_memory, there = large_files(job, number)
        assert not in_memory and there, (in_memory, there)
    recovery = replace(job, 1, 3)
    assert recovery.tiers == {0: "memory", 2: "memory", 3: "peer"} and recovery.lost <= 2 * EVERY
    end(job)
    assert not [*job.out.glob("nvme-node[023]/*")]  # what the lost host had stays until it is back
    assert_bitwise(job, uninterrupted(*WIDE[:6], ranks=3))


@campaign
def test_each_host_says_for_itself_where_it_keeps_copies_and_one_without_its_directory_goes_on(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job = started(new_cluster(0, 1, 2), *WIDE, replicas="1", in_memory=0)
    assert large_files(job, 0)[0] and large_files(job, 1)[1]
    shutil.rmtree(disk_of(job.cluster, 1))
    job.do_steps(2 * EVERY)
    gone = f"no copies can be kept in {disk_of(job.cluster, 1)}"
    assert re.search(rf"step \d+ is not copied to \S+ .*: node1: {gone}.*FC-045", job.text(1 << 20))
    assert re.search(rf"{gone}.* Make it again, .*FC-045", job.text(1 << 20))
    disk_of(job.cluster, 1).mkdir()
    job.until(lambda: large_files(job, 1)[1], "copies are made again")
    assert "copies of other hosts' files are kept in" in job.text(1 << 20)
    job.do_steps(EVERY)
    recovery = replace(job, 2, 2)
    assert recovery.tiers == {0: "memory", 1: "memory", 2: "peer"} and recovery.lost <= 2 * EVERY
    end(job)
    assert_bitwise(job, uninterrupted(*WIDE[:6], ranks=3))
