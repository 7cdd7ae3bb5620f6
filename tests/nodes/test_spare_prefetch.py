"""Spares that bring the shards of a host into their memory while they wait, and take its rank, or another one's.

Nothing is on storage. What ranks have loaded is compared, bit for bit, with what was saved.
"""

import pytest

from fastckpt._core.policy.replicas.copy_sizes import SMALL
from tests.nodes.conftest import Fleet
from tests.nodes.job import EVERY, NEVER, NodesJob
from tests.nodes.recovery import Line, Recovery
from tests.nodes.test_faults_in_phases import Pause
from tests.nodes.test_replicas import assert_same_state, digests

SCRIPT = ("--way", "fsdp2", "--width", "150000", "--digests", "--pace", "0.2", "--disk", NEVER)
"""A host of two has shards of 19 MB: more than the small files that each commit sends along."""
SPARE, NEXT = 2, 3
campaign = pytest.mark.campaign


def started(fleet: Fleet, copies: str = "1") -> NodesJob:
    """A job on two hosts that has done some steps, with places for spares that are not started yet."""
    hosts, flags = (0, 1, SPARE, NEXT), ("--fast-spares", "2", "--fast-replicas", copies)
    job = fleet.job(hosts, *SCRIPT, nodes="2", stores=hosts, flags=flags)
    job.launch(0, 1)
    job.do_steps(EVERY + 6)
    return job


def prefetched(job: NodesJob, number: int) -> tuple[Line, int]:
    """What a spare has prefetched just now, when a host of which it had an older save has made another; that host."""
    before = len(job.reported(number, "prefetched")) or 1
    job.until(lambda: len(job.reported(number, "prefetched")) > before, f"spare {number} has prefetched anew")
    found = job.reported(number, "prefetched")[-1]
    job.until(lambda: digests(job, "saving", found["step"]), "its digest is known")
    return found, int(found["host"].removeprefix("node"))


def taken_over(job: NodesJob, lost: int) -> Recovery:
    """Lose a host, and wait until the spare trains with its rank."""
    at = job.lose(lost)
    job.count_on(SPARE)
    recovery = job.recovered(at)
    assert recovery.ranks == {1 - lost: 1 - lost, SPARE: lost} and recovery.lost <= 2 * EVERY
    assert recovery.tiers == {1 - lost: "memory", SPARE: "peer"}
    assert_same_state(job, recovery.step)
    return recovery


def finish(job: NodesJob) -> None:
    job.agents |= job.waiting
    job.finish()


@pytest.mark.campaign
def test_a_spare_takes_over_from_what_it_has_prefetched(fleet: Fleet) -> None:
    """No large file comes over the network then."""
    job = started(fleet)
    job.park(SPARE)
    found, lost = prefetched(job, SPARE)
    recovery = taken_over(job, lost)
    (fetched,) = job.reported(SPARE, "fetched")
    assert fetched["step"] == recovery.step == found["step"] and fetched["bytes"] < SMALL < fetched["kept"]
    finish(job)


@campaign
def test_what_no_host_has_copied_is_in_the_spare(fleet: Fleet) -> None:
    """Without a spare the loss would cost what is not on storage."""
    job = started(fleet, copies="0")
    job.park(SPARE)
    found, lost = prefetched(job, SPARE)
    assert taken_over(job, lost).step == found["step"]
    finish(job)


@campaign
def test_a_spare_takes_over_at_once_when_the_source_of_its_prefetch_is_lost(fleet: Fleet) -> None:
    """What it lacks then comes from the partner of the lost host."""
    job = started(fleet)
    job.park(NEXT)
    lost = prefetched(job, NEXT)[1]  # of both the same
    job.count_on(NEXT)
    job.kill_node(NEXT)
    pause = Pause(job, SPARE, "spare.prefetch", parks=True).is_reached()
    taken_over(job, lost)
    assert job.reported(SPARE, "prefetched") == [] and job.reported(SPARE, "fetched")[0]["bytes"] > SMALL
    pause.end()
    finish(job)
