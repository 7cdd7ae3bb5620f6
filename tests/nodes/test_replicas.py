"""Jobs whose state is divided among hosts: what a lost one had comes from the memory of others, or from their disks."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import HOSTS, Cluster, name_of
from tests.nodes.job import EVERY, NEVER, SOON, NodesJob
from tests.nodes.storage_reads import DATA, StorageReads

FSDP = ("--way", "fsdp2")
WIDE = (*FSDP, "--width", "300000", "--steps", "200", "--disk", NEVER)
"""A host's shards have 25 MB: too much for the small files that each commit sends along."""
PARITY = (*FSDP, "--width", "400000")
"""As many MB on each of four hosts."""
THREE, FOUR = (0, 1, 2), (0, 1, 2, 3)
XOR = ("--fast-replicas", "xor:4")
campaign = pytest.mark.campaign


def digests(job: NodesJob, what: str, step: int) -> set[str]:
    """What ranks had together when they last began to save, or loaded, a step."""
    lines = [line for number in range(HOSTS) for line in job.lines(number)]
    lines = [line for line in lines if (line["what"], line.get("step")) == (what, step)]
    # Those whose save did not come to its end did the step again, with fewer ranks to round it.
    world = max(lines, key=lambda line: line["at"])["world"] if lines else 0
    return {line["digest"] for line in lines if line["world"] == world}


def assert_same_state(job: NodesJob, step: int) -> None:
    (saved,) = digests(job, "saving", step)
    assert digests(job, "loaded", step) == {saved}


def test_the_shards_of_a_lost_host_come_from_the_memory_of_others(fleet: Fleet) -> None:
    """As in docs/clusters/nodes.md. Of the checkpoints that are durable, which have all of it, no file is read."""
    flags = ("--fast-replicas", "1", "--fast-replica-mbps", "1000", "--fast-domain", "file:/proc/sys/kernel/hostname")
    job = fleet.started(THREE, *FSDP, "--disk", str(2 * EVERY), stores=THREE, flags=flags)
    job.until(lambda: [*job.cluster.storage.glob("*/*.distcp")], "a durable checkpoint")
    with StorageReads(job.cluster.storage) as reads:
        recovery = job.replace(1, 3)
        assert not {path.name for path in reads.paths() if path.suffix in DATA}
    assert recovery.tiers == {0: "memory", 2: "memory", 3: "peer"} and recovery.lost <= EVERY
    fleet.finish(job, ranks=3)


@pytest.mark.parametrize("grows", [False, pytest.param(True, marks=campaign)])
def test_the_hosts_that_are_left_divide_the_shards_of_all_from_memory(fleet: Fleet, grows: bool) -> None:
    """Losses of another number of ranks differ by their roundings: the state is compared, as it was when saved."""
    job = fleet.started(THREE, *FSDP, "--digests", "--disk", NEVER, nodes="2:3", stores=THREE)
    assert_resumed_from_memory(job, job.lose(2))
    if grows:  # a fresh host comes, and three divide what two have saved
        job.do_steps(EVERY + 5)
        assert_resumed_from_memory(job, job.add(3))
    job.finish()


def assert_resumed_from_memory(job: NodesJob, at: float, most: int = EVERY) -> None:
    recovery = job.recovered(at, SOON)
    assert set(recovery.tiers.values()) <= {"memory", "peer"} and recovery.lost <= most
    assert_same_state(job, recovery.step)


@campaign
@pytest.mark.parametrize(
    ("hosts", "nodes", "script", "flags"),
    [
        pytest.param((0, 1), "1:2", FSDP, (), id="the last of two"),
        pytest.param(FOUR, "3:4", PARITY, XOR, id="of a group with parity"),
    ],
)
def test_hosts_that_are_left_go_on_with_the_shards_of_all(
    fleet: Fleet, hosts: Sequence[int], nodes: str, script: Sequence[str], flags: Sequence[str]
) -> None:
    job = fleet.started(hosts, *script, "--digests", "--disk", NEVER, nodes=nodes, stores=hosts, flags=flags)
    assert_resumed_from_memory(job, job.lose(hosts[-2]), 2 * EVERY if flags else EVERY)
    job.finish()


SMALL = (*FSDP, "--disk", NEVER)
HSDP = ("--way", "hsdp", "--disk", NEVER)
REBUILT = (*PARITY, "--steps", "120", "--disk", NEVER)


@campaign
@pytest.mark.parametrize(
    ("hosts", "script", "flags", "lost", "fresh"),
    [
        *(pytest.param((1, 3), SMALL, (), 3, fresh, id=f"of two, node{fresh} comes") for fresh in (0, 3, 6)),
        pytest.param(FOUR, HSDP, (), 2, 2, id="hsdp"),
        pytest.param(THREE, WIDE, (), 1, 3, id="large shards from a partner"),
        *(pytest.param(FOUR, REBUILT, XOR, lost, lost, id=f"parity, of node{lost}") for lost in (0, 1, 3)),
    ],
)
def test_shards_of_a_lost_host_come_from_those_that_are_left(
    fleet: Fleet, hosts: Sequence[int], script: Sequence[str], flags: Sequence[str], lost: int, fresh: int
) -> None:
    job = fleet.started(hosts, *script, stores=hosts, flags=flags)
    recovery = job.replace(lost, fresh)
    own = "peer" if script is not HSDP else recovery.tiers[fresh]
    assert recovery.tiers == dict.fromkeys({*hosts} - {lost}, "memory") | {fresh: own}
    assert recovery.lost <= (EVERY if script in (SMALL, HSDP) else 2 * EVERY)
    fleet.finish(job, ranks=len(hosts))


@campaign
def test_two_lost_hosts_of_a_group_with_parity_cost_what_is_not_on_storage(fleet: Fleet) -> None:
    job = fleet.started(FOUR, *REBUILT, "--disk", "20", stores=FOUR, flags=XOR, steps=3 * EVERY + 6)
    job.until(lambda: 13 <= job.reached() % 20 <= 16, "a save in memory that storage lacks")
    for number in (1, 2):
        job.lose(number)
    recovery = job.recovered(job.add(1, 2))
    assert recovery.step >= 20 and recovery.step % 20 == 0
    assert "no node that is left has files of ranks [1, 2], or whole parity" in job.text(1 << 20)
    fleet.finish(job, ranks=4)


@campaign
def test_hosts_that_are_left_without_copies_go_on_from_storage_within_two_minutes(fleet: Fleet) -> None:
    """They wait a minute for what the lost one may have written: its shards were in its memory alone."""
    script, flags = (*FSDP, "--width", "300000", "--digests", "--disk", "20"), ("--fast-replicas", "0")
    # step 30 is in memory
    job = fleet.started(THREE, *script, nodes="2:3", stores=THREE, flags=flags, steps=2 * EVERY + 12)
    recovery = job.recovered(job.lose(2), 120)
    assert recovery.step == 20 and set(recovery.tiers.values()) <= {"storage", "mixed"}
    assert_same_state(job, recovery.step)
    job.finish()


# --- copies on a disk of each host, and not in memory

ON_DISK = (*FSDP, "--width", "300000", "--steps", "100", "--disk", NEVER)
LARGE = "+8M"


def disk_of(cluster: Cluster, number: int) -> Path:
    return cluster.folder / f"nvme-{name_of(number)}"


def on_disk(cluster: Cluster, number: int) -> tuple[str, str]:
    """The option of a host, whose directory is made."""
    disk_of(cluster, number).mkdir(exist_ok=True)
    return "--fast-replica-medium", f"disk:{disk_of(cluster, number)}"


def started(fleet: Fleet, *, replicas: str, in_memory: int = -1) -> NodesJob:
    """A job that has made copies, on the disks of all hosts but for one."""
    job = fleet.job(THREE, *ON_DISK, stores=THREE, flags=("--fast-replicas", replicas))
    for number in THREE:
        job.launch(number, flags=() if number == in_memory else on_disk(job.cluster, number))
    job.do_steps(2 * EVERY + 6)
    return job


def assert_replaced(job: NodesJob, lost: int, fresh: int) -> None:
    recovery = job.replace(lost, fresh, flags=on_disk(job.cluster, fresh))
    others = dict.fromkeys({*THREE} - {lost}, "memory")
    assert recovery.tiers == others | {fresh: "peer"} and recovery.lost <= 2 * EVERY


def large_files(job: NodesJob, number: int) -> tuple[list[str], list[str]]:
    """Large files of others in the memory of a host, and on its disk."""

    def found(folder: str) -> list[str]:
        here = job.cluster.hosts[number].run("find", folder, "-type", "f", "-size", LARGE)
        return [path for path in here.splitlines() if "/kept/" in path or "/parity/" in path]

    disk = disk_of(job.cluster, number)
    return found("/dev/shm"), found(str(disk)) if disk.exists() else []


@campaign
@pytest.mark.parametrize("replicas", ["1", "xor:3"])
def test_shards_of_a_lost_host_come_from_the_disk_of_others(fleet: Fleet, replicas: str) -> None:
    job = started(fleet, replicas=replicas)
    for number in THREE:
        in_memory, there = large_files(job, number)
        assert not in_memory and there, (in_memory, there)
    assert_replaced(job, 1, 3)
    fleet.finish(job, ranks=3)
    assert not [*job.out.glob("nvme-node[023]/*")]  # what the lost host had stays until it is back


@campaign
def test_each_host_says_for_itself_where_it_keeps_copies_and_one_without_its_directory_goes_on(fleet: Fleet) -> None:
    job = started(fleet, replicas="1", in_memory=0)
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
    assert_replaced(job, 2, 2)
    fleet.finish(job, ranks=3)
