"""Jobs with a spare host, as in docs/clusters/nodes.md: it takes the rank of one that is lost, or fails twice."""

import time

import pytest

from fastckpt._core.policy.replicas.copy_sizes import SMALL
from tests.nodes.conftest import Fleet
from tests.nodes.job import EVERY, NEVER, SOON, NodesJob
from tests.nodes.recovery import Line, Recovery
from tests.nodes.test_faults_in_phases import Pause
from tests.nodes.test_replicas import assert_same_state, digests

campaign = pytest.mark.campaign
SCRIPT = ("--way", "fsdp2", "--width", "150000", "--digests", "--pace", "0.2", "--disk", NEVER)
"""A host of two has shards of 19 MB: more than the small files that each commit sends along."""
SPARE, NEXT = 2, 3


def taken_over(job: NodesJob, at: float, number: int, seconds: float = SOON) -> Recovery:
    """Wait until a spare trains, since a host was lost."""
    job.count_on(number)
    recovery = job.recovered(at, seconds)
    assert number in recovery.ranks and recovery.lost <= EVERY
    return recovery


def test_a_spare_takes_the_rank_of_a_host_that_failed_twice_and_gives_it_back_when_it_is_lost(fleet: Fleet) -> None:
    job = fleet.with_spares(2, 1)

    # A host that fails for the second time gives its place to the spare, and waits itself.
    first = job.recovered(job.kill_worker(1), SOON)
    assert (first.ranks, first.starts) == ({0: 0, 1: 1}, {0: 1, 1: 1})
    job.do_steps(5)
    killed = job.kill_worker(1)
    job.set_aside(1)
    recovery = taken_over(job, killed, 2)
    assert recovery.ranks == {0: 0, 2: 1} and recovery.starts == {0: 1, 2: 1}
    assert recovery.tiers == {0: "memory", 2: "peer"}
    said = "host node1 is left out while a spare waits: it failed 2 times, and no other for the same cause"
    assert said in job.text()
    job.do_steps(5)

    # When the spare is lost with its memory, nobody else is left.
    recovery = taken_over(job, job.lose(2), 1)
    assert recovery.ranks == {0: 0, 1: 1} and recovery.tiers[0] == "memory"
    fleet.finish(job, ranks=2)


@campaign
@pytest.mark.parametrize("seconds", [None, 0.0, 0.4, 0.8, 1.2])
def test_when_a_spare_dies_while_it_waits_or_takes_over_the_next_one_takes_over(
    fleet: Fleet, seconds: float | None
) -> None:
    """Seconds from the loss of a member to the death of the spare; none: it dies just before."""
    job = fleet.with_spares(2, 2)
    job.count_on(2)
    if seconds is None:
        job.kill_node(2)
    lost = job.lose(1)
    if seconds is not None:
        time.sleep(seconds)
        job.kill_node(2)
    recovery = taken_over(job, lost, 3)
    assert recovery.ranks == {0: 0, 3: 1} and recovery.tiers == {0: "memory", 3: "peer"}
    fleet.finish(job, ranks=2)


# --- spares that bring the shards of a host into their memory while they wait


def with_places(fleet: Fleet, copies: str = "1") -> NodesJob:
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


def taken_over_prefetched(job: NodesJob, lost: int) -> Recovery:
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


@campaign
@pytest.mark.parametrize("copies", ["1", "0"])
def test_a_spare_takes_over_from_what_it_has_prefetched(fleet: Fleet, copies: str) -> None:
    """No large file comes over the network then; without copies, the loss would cost what is not on storage."""
    job = with_places(fleet, copies)
    job.park(SPARE)
    found, lost = prefetched(job, SPARE)
    recovery = taken_over_prefetched(job, lost)
    assert recovery.step == found["step"]
    if copies != "0":
        (fetched,) = job.reported(SPARE, "fetched")
        assert fetched["step"] == recovery.step and fetched["bytes"] < SMALL < fetched["kept"]
    finish(job)


@campaign
def test_a_spare_takes_over_at_once_when_the_source_of_its_prefetch_is_lost(fleet: Fleet) -> None:
    """What it lacks then comes from the partner of the lost host."""
    job = with_places(fleet)
    job.park(NEXT)
    lost = prefetched(job, NEXT)[1]  # of both the same
    job.count_on(NEXT)
    job.kill_node(NEXT)
    pause = Pause(job, SPARE, "spare.prefetch", parks=True).is_reached()
    taken_over_prefetched(job, lost)
    assert job.reported(SPARE, "prefetched") == [] and job.reported(SPARE, "fetched")[0]["bytes"] > SMALL
    pause.end()
    finish(job)
