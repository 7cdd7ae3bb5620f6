"""Faults while what is divided among hosts is copied to others, and while it is restored from copies.

Three hosts save shards of 25 MB each to memory. One of them stops in a phase of its third copy, so that earlier saves
have been copied; then the fault happens: to it, as to a fresh host in other tests, or to another one. Without storage,
nothing older than the newest save that was copied is lost.
"""

from collections.abc import Callable

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.hosts import Cluster
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.recovery import Line
from tests.nodes.test_faults_in_phases import FRESH as AT
from tests.nodes.test_faults_in_phases import (
    Pause,
    cut_the_link,
    kill_another_worker,
    kill_the_fresh_agent,
    lose_the_fresh_host,
)
from tests.nodes.test_lost_hosts import EVERY, SOON, campaign, end, replace, started
from tests.nodes.test_replicas import WIDE, assert_same_state
from tests.nodes.test_restarts import assert_bitwise

DIGEST, SEND, RECEIVE, FETCH = "replicas.digest", "replicas.send", "replicas.receive", "peers.fetch"
COPIES = 3
Fault = Callable[[NodesJob], None]


def lose_another(job: NodesJob) -> None:
    job.lose(1)
    job.cluster.add(1)
    job.launch(1)


FAULTS = [lose_the_fresh_host, lose_another, kill_the_fresh_agent, kill_another_worker, cut_the_link]


@campaign
@pytest.mark.parametrize("phase", [DIGEST, SEND, RECEIVE])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda value: value.__name__)
def test_a_job_comes_back_from_memory_through_each_fault_in_each_phase_of_a_copy(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, phase: str, fault: Fault
) -> None:
    script = ("--memory", str(EVERY), *WIDE)
    job = NodesJob(new_cluster(0, 1, 2), *script, nodes="3", meeting=endpoint(0, 1, 2))
    job.launch(0, 1)
    pause = Pause(job, AT, phase, COPIES)
    reached = job.reached()
    fault(job)
    pause.end()
    job.until(lambda: all(resumes(job, number) for number in job.agents), "all have resumed")
    found = [line for number in job.agents for line in resumes(job, number)]
    assert {line["tier"] for line in found} <= {"memory", "peer"}
    assert reached - min(line["step"] for line in found) <= 4 * EVERY
    end(job)
    assert_bitwise(job, uninterrupted(*WIDE[:6], ranks=3))


@campaign
def test_hosts_that_are_left_amid_a_copy_do_not_wait_for_parts_of_the_lost_one(new_cluster: NewCluster) -> None:
    """Of the newest save a part is lost: that before it was copied, and it is resumed at once."""
    script = ("--memory", str(EVERY), "--digests", *WIDE)
    job = NodesJob(new_cluster(0, 1, 2), *script, nodes="2:3", meeting=endpoint(0, 1, 2))
    job.launch(0, 1)
    pause = Pause(job, AT, SEND, COPIES)
    at = job.lose(AT)
    pause.end()
    recovery = job.recovered(at, SOON)
    assert set(recovery.tiers.values()) <= {"memory", "peer"}
    assert_same_state(job, recovery.step)
    end(job)


@campaign
@pytest.mark.parametrize("fault", [kill_the_fresh_agent, lose_the_fresh_host], ids=lambda value: value.__name__)
def test_a_fresh_host_that_ends_while_it_fetches_shards_is_followed_by_another(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, fault: Fault
) -> None:
    job = started(new_cluster(0, 1, 2), *WIDE, meeting=endpoint(0, 1, 2))
    job.do_steps(EVERY)
    at = job.lose(AT)
    job.cluster.add(AT)
    pause = Pause(job, AT, FETCH)
    fault(job)
    pause.end()
    recovery = job.recovered(at)
    assert recovery.tiers == {0: "memory", 1: "memory", AT: "peer"}
    end(job)
    assert_bitwise(job, uninterrupted(*WIDE[:6], ranks=3))


@campaign
def test_a_damaged_copy_is_not_loaded_and_storage_has_the_save_before(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    """Both large copies in the memory of hosts that are left are damaged; what is durable is resumed by all."""
    script = (*WIDE[:6], "--disk", "20")
    job = started(new_cluster(0, 1, 2), *script, meeting=endpoint(0, 1, 2))
    job.do_steps(3 * EVERY)
    job.lose(AT)
    for number in (0, 1):
        flip_copies(job, number)
    job.cluster.add(AT)
    at = job.launch(AT)
    recovery = job.recovered(at)
    assert recovery.step % 20 == 0 and recovery.tiers[AT] in ("storage", "peer")
    assert "was not fetched from" in job.text(1 << 20) or "not resumed from" in job.text(1 << 20)
    end(job)
    assert_bitwise(job, uninterrupted(*WIDE[:6], ranks=3))


@campaign
def test_a_host_and_its_partner_that_are_lost_cost_what_is_not_on_storage(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    script = (*WIDE[:6], "--disk", "20")
    job = started(new_cluster(0, 1, 2), *script, meeting=endpoint(0, 1, 2))
    job.do_steps(3 * EVERY)
    for number in (1, 2):  # of three, one of any two keeps the copy of the other
        job.lose(number)
    for number in (1, 2):
        job.cluster.add(number)
    at = job.launch(1, 2)
    recovery = job.recovered(at)
    assert recovery.step >= 20 and recovery.step % 20 == 0
    assert recovery.tiers[1] == recovery.tiers[2] == "storage"
    end(job)
    assert_bitwise(job, uninterrupted(*WIDE[:6], ranks=3))


@campaign
def test_a_host_without_room_for_copies_costs_what_is_not_on_storage_and_says_so(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    """Another one fills its memory: copies are left out, training goes on, and a loss of a host means storage."""
    script = (*WIDE[:6], "--disk", "20")
    cluster = new_cluster(0, 1, 2)
    fill(cluster, 430)
    job = started(cluster, *script, meeting=endpoint(0, 1, 2))
    job.do_steps(3 * EVERY)
    recovery = replace(job, 1, 1)
    assert recovery.step % 20 == 0 and set(recovery.tiers.values()) <= {"storage", "mixed", "memory"}
    assert "FC-045" in job.text(1 << 20)
    end(job)
    assert_bitwise(job, uninterrupted(*WIDE[:6], ranks=3))


@campaign
def test_two_hosts_of_a_rack_that_are_to_keep_two_copies_say_that_each_keeps_one_there(new_cluster: NewCluster) -> None:
    job = started(new_cluster(0, 1), *WIDE, flags=("--fast-replicas", "2", "--fast-domain", "rack-a"))
    for number in (0, 1):
        output = (job.out / f"output.node{number}").read_text()
        assert output.count("--fast-replicas 2 needs 3 hosts, and there are 2: one copy is made") == 1
        assert output.count(f"copies of node{number} (rack-a) are on node{1 - number}, also rack-a: ") == 1
    end(job)


@campaign
def test_the_memory_of_copies_is_there_for_the_saves_of_a_host_that_is_left_alone(new_cluster: NewCluster) -> None:
    """It has twice as much to save then, and its memory has no room for that beside the copies of both saves."""
    cluster = new_cluster(0, 1)
    fill(cluster, 270)
    job = started(cluster, *WIDE, nodes="1:2", meeting=endpoint(0, 1))
    job.do_steps(3 * EVERY)
    recovery = job.recovered(job.lose(1))
    assert recovery.tiers == {0: "memory"} and recovery.lost <= 2 * EVERY
    job.do_steps(2 * EVERY)
    newer = [line["what"] for line in job.lines(0) if line["what"] in ("saved", "skipped") and line["world"] == 1]
    assert newer and set(newer) == {"saved"}
    end(job)


def fill(cluster: Cluster, mebibytes: int) -> None:
    """Have something else take so much of the memory of each host."""
    filler = f"import os; file = open('/dev/shm/filler', 'wb'); os.posix_fallocate(file.fileno(), 0, {mebibytes} << 20)"
    for host in cluster.hosts.values():
        assert host.start("-c", filler, output=cluster.folder / "filled").wait(60) == 0


def resumes(job: NodesJob, number: int) -> list[Line]:
    """The loads of a host's workers that found something."""
    return [line for line in job.lines(number) if line["what"] == "loaded" and line["step"]]


def flip_copies(job: NodesJob, number: int) -> None:
    """Flip a byte of each large copy that a host keeps."""
    program = (
        "import pathlib\n"
        "for path in pathlib.Path('/dev/shm').glob('*/kept/*/__*.distcp'):\n"
        "    with path.open('r+b') as file:\n"
        "        file.seek(1 << 20); byte = file.read(1); file.seek(1 << 20); file.write(bytes([byte[0] ^ 1]))\n"
        "        print(path, flush=True)\n"
    )
    assert job.cluster.hosts[number].start("-c", program, output=job.out / "flipped").wait(60) == 0
