"""Faults while four hosts renew the parity that they keep of each other's shards, of 19 MB on each.

One stops in a phase of its third renewal, so that earlier saves have parity. Then it is lost with its memory, or
another one is, and a fresh host comes. Nothing is on storage: what memory and parity do not give back is lost.
"""

import time

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.test_faults_in_phases import FRESH as AT
from tests.nodes.test_faults_in_phases import Pause
from tests.nodes.test_faults_of_copies import resumes
from tests.nodes.test_lost_hosts import EVERY, NEVER, campaign, end, started
from tests.nodes.test_restarts import assert_bitwise

SHARDS = ("--way", "fsdp2", "--width", "300000", "--steps", "60")
SLOWLY = ("--pace", "0.2", "--disk", NEVER)
"""The end is not reached before the fault, wherever the job runs."""
HOSTS = (0, 1, 2, 3)
FLAGS = ("--fast-replicas", "xor:4")
COMMIT = "parity.commit"
PHASES = {  # and how often a host has been in it when it is amid its third renewal
    "replicas.digest": 3,
    "replicas.send": 3,
    "parity.digest": 8,  # of one chunk for each other host
    "parity.receive": 8,
    "parity.add": 8,
    COMMIT: 3,
}


def have_come(job: NodesJob, number: int) -> None:
    """Have a fresh host come in the place of one that is lost now."""
    job.lose(number)
    job.cluster.add(number)
    job.launch(number)


@campaign
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lost", [AT, 1], ids=["the host in it", "another"])
def test_a_loss_in_each_phase_of_a_renewal_of_parity_is_restored_from_memory(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, phase: str, lost: int
) -> None:
    script = ("--memory", str(EVERY), *SHARDS, *SLOWLY)
    job = NodesJob(new_cluster(*HOSTS), *script, nodes="4", meeting=endpoint(*HOSTS), flags=FLAGS)
    job.launch(*(number for number in HOSTS if number != AT))
    pause = Pause(job, AT, phase, PHASES[phase])
    if phase == COMMIT:
        time.sleep(2)  # the others commit theirs
    reached = job.reached()
    have_come(job, lost)
    pause.end()
    job.until(lambda: all(resumes(job, number) for number in job.agents), "all have resumed")
    found = {number: resumes(job, number)[-1] for number in job.agents}
    tiers = {number: line["tier"] for number, line in found.items()}
    assert tiers == {number: "peer" if number == lost else "memory" for number in HOSTS}
    assert 0 <= reached - min(line["step"] for line in found.values()) <= 4 * EVERY
    end(job)
    assert_bitwise(job, uninterrupted(*SHARDS, ranks=4))


@campaign
@pytest.mark.parametrize("phase", ["parity.receive", COMMIT])
def test_a_fresh_host_that_is_lost_before_its_group_has_parity_again_is_restored_once_more(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, phase: str
) -> None:
    job = started(new_cluster(*HOSTS), *SHARDS, *SLOWLY, meeting=endpoint(*HOSTS), flags=FLAGS)
    job.do_steps(5)
    job.lose(AT)
    job.cluster.add(AT)
    pause = Pause(job, AT, phase)
    time.sleep(2)  # the others commit theirs
    at = job.lose(AT)
    job.cluster.add(AT)
    job.launch(AT)
    pause.end()
    recovery = job.recovered(at)
    assert recovery.tiers == {number: "peer" if number == AT else "memory" for number in HOSTS}
    end(job)
    assert_bitwise(job, uninterrupted(*SHARDS, ranks=4))
