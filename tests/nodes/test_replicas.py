"""Jobs whose state is divided among hosts: what a lost one had comes from the memory of others."""

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.hosts import HOSTS
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.storage_reads import DATA, StorageReads
from tests.nodes.test_lost_hosts import EVERY, NEVER, SOON, campaign, end, replace, started
from tests.nodes.test_restarts import assert_bitwise


def test_the_shards_of_a_lost_host_come_from_the_memory_of_others(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    """As in docs/clusters/nodes.md. Of the checkpoints that are durable, which have all of it, no file is read."""
    script = ("--way", "fsdp2")
    flags = ("--fast-replicas", "1", "--fast-replica-mbps", "1000", "--fast-domain", "file:/proc/sys/kernel/hostname")
    job = started(new_cluster(0, 1, 2), *script, "--disk", str(2 * EVERY), meeting=endpoint(0, 1, 2), flags=flags)
    job.until(lambda: [*job.cluster.storage.glob("*/*.distcp")], "a durable checkpoint")
    with StorageReads(job.cluster.storage) as reads:
        recovery = replace(job, 1, 3)
        assert not {path.name for path in reads.paths() if path.suffix in DATA}
    assert recovery.tiers == {0: "memory", 2: "memory", 3: "peer"} and recovery.lost <= EVERY
    end(job)
    assert_bitwise(job, uninterrupted(*script, ranks=3))


def test_the_hosts_that_are_left_divide_the_shards_of_all_from_memory(new_cluster: NewCluster) -> None:
    """Losses of another number of ranks differ by their roundings: the state is compared, as it was when saved."""
    script = ("--way", "fsdp2", "--digests", "--disk", NEVER)
    job = started(new_cluster(0, 1, 2), *script, nodes="2:3", meeting=endpoint(0, 1, 2))
    recovery = job.recovered(job.lose(2), SOON)
    assert set(recovery.tiers.values()) <= {"memory", "peer"} and recovery.lost <= EVERY
    assert_same_state(job, recovery.step)
    job.do_steps(EVERY + 5)
    # A fresh host comes, and three divide what two have saved.
    job.cluster.add(3)
    fresh = job.launch(3)
    recovery = job.recovered(fresh, SOON)
    assert set(recovery.tiers.values()) <= {"memory", "peer"} and recovery.lost <= EVERY
    assert_same_state(job, recovery.step)
    end(job)


@campaign
@pytest.mark.parametrize("fresh", [0, 3, 6])
def test_one_of_two_hosts_gives_a_fresh_one_its_shards_wherever_that_sorts(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, fresh: int
) -> None:
    job = started(new_cluster(1, 3), "--way", "fsdp2", "--disk", NEVER)
    recovery = replace(job, 3, fresh)
    assert recovery.tiers == {1: "memory", fresh: "peer"} and recovery.lost <= EVERY
    end(job)
    assert_bitwise(job, uninterrupted("--way", "fsdp2", ranks=2))


@campaign
def test_hsdp_takes_the_shards_of_a_lost_host_from_others(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job = started(new_cluster(0, 1, 2, 3), "--way", "hsdp", "--disk", NEVER)
    recovery = replace(job, 2, 2)
    assert {recovery.tiers[number] for number in (0, 1, 3)} == {"memory"} and recovery.lost <= EVERY
    end(job)
    assert_bitwise(job, uninterrupted("--way", "hsdp", ranks=4))


@campaign
def test_the_last_of_two_hosts_goes_on_with_the_shards_of_both(new_cluster: NewCluster) -> None:
    script = ("--way", "fsdp2", "--digests", "--disk", NEVER)
    job = started(new_cluster(0, 1), *script, nodes="1:2", meeting=endpoint(0, 1))
    recovery = job.recovered(job.lose(0), SOON)
    assert recovery.tiers == {1: "memory"} and recovery.lost <= EVERY
    assert_same_state(job, recovery.step)
    end(job)


def assert_same_state(job: NodesJob, step: int) -> None:
    (saved,) = digests(job, "saving", step)
    assert digests(job, "loaded", step) == {saved}


def digests(job: NodesJob, what: str, step: int) -> set[str]:
    """What ranks had together when they last began to save, or loaded, a step."""
    lines = [
        line
        for number in range(HOSTS)
        for line in job.lines(number)
        if (line["what"], line.get("step")) == (what, step)
    ]
    # Those whose save did not come to its end did the step again, with fewer ranks to round it.
    world = max(lines, key=lambda line: line["at"])["world"] if lines else 0
    return {line["digest"] for line in lines if line["world"] == world}


WIDE = ("--way", "fsdp2", "--width", "300000", "--steps", "200", "--disk", NEVER)
"""A host's shards have 25 MB: too much for the small files that each commit sends along."""


WIDER = ("--way", "fsdp2", "--width", "400000", "--steps", "120", "--disk", NEVER)
"""As many MB on each of four hosts."""


@campaign
def test_large_shards_of_a_lost_host_come_from_its_partner(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job = started(new_cluster(0, 1, 2), *WIDE, meeting=endpoint(0, 1, 2))
    recovery = replace(job, 1, 3)
    assert recovery.tiers == {0: "memory", 2: "memory", 3: "peer"} and recovery.lost <= 2 * EVERY
    end(job)
    assert_bitwise(job, uninterrupted(*WIDE[:6], ranks=3))


@campaign
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_shards_of_a_lost_host_of_four_are_rebuilt_from_parity(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, lost: int
) -> None:
    flags = ("--fast-replicas", "xor:4")
    job = started(new_cluster(0, 1, 2, 3), *WIDER, meeting=endpoint(0, 1, 2, 3), flags=flags)
    recovery = replace(job, lost, lost)
    assert {recovery.tiers[number] for number in range(4) if number != lost} == {"memory"}
    assert recovery.tiers[lost] == "peer" and recovery.lost <= 2 * EVERY
    end(job)
    assert_bitwise(job, uninterrupted(*WIDER[:6], ranks=4))


@campaign
def test_the_hosts_that_are_left_of_a_group_with_parity_divide_what_it_gives_back(new_cluster: NewCluster) -> None:
    script = ("--way", "fsdp2", "--width", "400000", "--digests", "--disk", NEVER)
    flags = ("--fast-replicas", "xor:4")
    job = started(new_cluster(0, 1, 2, 3), *script, nodes="3:4", meeting=endpoint(0, 1, 2, 3), flags=flags)
    recovery = job.recovered(job.lose(2))
    assert set(recovery.tiers.values()) <= {"memory", "peer"} and recovery.lost <= 2 * EVERY
    assert_same_state(job, recovery.step)
    end(job)


@campaign
def test_two_lost_hosts_of_a_group_with_parity_cost_what_is_not_on_storage(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    script = (*WIDER[:6], "--disk", "20")
    flags = ("--fast-replicas", "xor:4")
    job = started(new_cluster(0, 1, 2, 3), *script, meeting=endpoint(0, 1, 2, 3), flags=flags)
    job.do_steps(2 * EVERY)
    job.until(lambda: 13 <= job.reached() % 20 <= 16, "a save in memory that storage lacks")
    job.lose(1)
    job.lose(2)
    for number in (1, 2):
        job.cluster.add(number)
    recovery = job.recovered(job.launch(1, 2))
    assert recovery.step >= 20 and recovery.step % 20 == 0
    assert "no node that is left has files of ranks [1, 2], or whole parity" in job.text(1 << 20)
    end(job)
    assert_bitwise(job, uninterrupted(*WIDER[:6], ranks=4))


@campaign
def test_hosts_that_are_left_without_copies_go_on_from_storage_within_two_minutes(new_cluster: NewCluster) -> None:
    """They wait a minute for what the lost one may have written: its shards were in its memory alone."""
    script = ("--way", "fsdp2", "--width", "300000", "--digests", "--disk", "20")
    flags = ("--fast-replicas", "0")
    job = started(new_cluster(0, 1, 2), *script, nodes="2:3", meeting=endpoint(0, 1, 2), flags=flags)
    job.do_steps(EVERY + 6)  # step 30 is in memory
    recovery = job.recovered(job.lose(2), 120)
    assert recovery.step == 20 and set(recovery.tiers.values()) <= {"storage", "mixed"}
    assert_same_state(job, recovery.step)
    end(job)
