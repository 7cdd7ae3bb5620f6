"""Jobs whose state is divided among hosts: what a lost one had comes from the memory of others, or from their disks."""

import re
from collections.abc import Sequence

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import HOSTS, name_of
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


@pytest.mark.parametrize(
    ("hosts", "nodes", "flags", "grows"),
    [
        pytest.param(THREE, "2:3", (), False, id="False"),
        pytest.param(THREE, "2:3", (), True, id="True", marks=campaign),
        pytest.param(FOUR, "3:4", XOR, False, id="of a group with parity", marks=campaign),
    ],
)
def test_the_hosts_that_are_left_divide_the_shards_of_all_from_memory(
    fleet: Fleet, hosts: Sequence[int], nodes: str, flags: Sequence[str], grows: bool
) -> None:
    """Losses of another number of ranks differ by their roundings: the state is compared, as it was when saved."""
    script = PARITY if flags else FSDP
    job = fleet.started(hosts, *script, "--digests", "--disk", NEVER, nodes=nodes, stores=hosts, flags=flags)
    assert_resumed_from_memory(job, job.lose(2), 2 * EVERY if flags else EVERY)
    if grows:  # a fresh host comes, and three divide what two have saved
        job.do_steps(EVERY + 5)
        assert_resumed_from_memory(job, job.add(3))
    job.finish()


def assert_resumed_from_memory(job: NodesJob, at: float, most: int = EVERY) -> None:
    recovery = job.recovered(at, SOON)
    assert set(recovery.tiers.values()) <= {"memory", "peer"} and recovery.lost <= most
    assert_same_state(job, recovery.step)


SMALL = (*FSDP, "--disk", NEVER)
HSDP = ("--way", "hsdp", "--disk", NEVER)
REBUILT = (*PARITY, "--steps", "120", "--disk", NEVER)


@campaign
@pytest.mark.parametrize(
    ("hosts", "script", "flags", "lost", "fresh"),
    [
        pytest.param((1, 3), SMALL, (), 3, 0, id="of two, node0 comes"),
        pytest.param(FOUR, HSDP, (), 2, 2, id="hsdp"),
        pytest.param(THREE, WIDE, (), 1, 3, id="large shards from a partner"),
        pytest.param(FOUR, REBUILT, XOR, 0, 0, id="parity, of node0"),
        pytest.param(FOUR, REBUILT, XOR, 3, 3, id="parity, of node3"),
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
def test_hosts_that_are_left_without_copies_go_on_from_storage_within_two_minutes(fleet: Fleet) -> None:
    """They wait a minute for what the lost one may have written: its shards were in its memory alone."""
    script, flags = (*FSDP, "--width", "300000", "--digests", "--disk", "20"), ("--fast-replicas", "0")
    # step 30 is in memory
    job = fleet.started(THREE, *script, nodes="2:3", stores=THREE, flags=flags, steps=2 * EVERY + 12)
    recovery = job.recovered(job.lose(2), 120)
    assert recovery.step == 20 and set(recovery.tiers.values()) <= {"storage", "mixed"}
    assert_same_state(job, recovery.step)
    job.finish()


@campaign
@pytest.mark.parametrize("replicas", ["1", "xor:3"])
def test_shards_of_a_lost_host_come_from_the_disk_of_others(fleet: Fleet, replicas: str) -> None:
    """Copies are on a disk of each host, and not in memory; what the lost host had there stays until it is back."""
    script = (*FSDP, "--width", "300000", "--steps", "100", "--disk", NEVER)
    job = fleet.job(THREE, *script, stores=THREE, flags=("--fast-replicas", replicas))
    disks = {number: job.out / f"nvme-{name_of(number)}" for number in (*THREE, 3)}
    flags = {number: ("--fast-replica-medium", f"disk:{disk}") for number, disk in disks.items()}
    for number, disk in disks.items():
        disk.mkdir()
        if number in THREE:
            job.launch(number, flags=flags[number])
    job.do_steps(2 * EVERY + 6)
    for number in THREE:
        find = ("find", "/dev/shm", str(disks[number]), "-type", "f", "-size", "+8M")
        found = [
            path for path in job.cluster.hosts[number].run(*find).splitlines() if re.search("/(kept|parity)/", path)
        ]
        assert found and not [path for path in found if path.startswith("/dev/shm")]
    recovery = job.replace(1, 3, flags=flags[3])
    assert recovery.tiers == {0: "memory", 2: "memory", 3: "peer"} and recovery.lost <= 2 * EVERY
    fleet.finish(job, ranks=3)
    assert not [*job.out.glob("nvme-node[023]/*")]
