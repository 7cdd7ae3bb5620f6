"""Spares that bring the shards of a host into their memory while they wait, and take its rank, or another one's.

Nothing is on storage. What ranks have loaded is compared, bit for bit, with what was saved.
"""

import subprocess
from pathlib import Path

from fastckpt._core.policy.replicas.copy_sizes import SMALL
from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.recovery import Line, Recovery
from tests.nodes.test_faults_in_phases import PAUSES
from tests.nodes.test_lost_hosts import EVERY, NEVER, campaign, end
from tests.nodes.test_replicas import assert_same_state, digests
from tests.nodes.test_restarts import assert_bitwise
from tests.support.json_lines import whole_lines

SHAPE = ("--way", "fsdp2", "--width", "150000")
"""A host of two has shards of 19 MB: more than the small files that each commit sends along."""
SCRIPT = (*SHAPE, "--digests", "--pace", "0.2", "--disk", NEVER)
SPARE, NEXT = 2, 3
PREFETCH, FETCH = "spare.prefetch", "peers.fetch"


class SpareJob(NodesJob):
    """A job on two hosts that has done some steps, with places for spares that are not started yet."""

    def __init__(self, new_cluster: NewCluster, *script: str, copies: str = "1") -> None:
        cluster = new_cluster(0, 1, SPARE, NEXT)
        flags = ("--fast-spares", "2", "--fast-replicas", copies)
        every = ("--memory", str(EVERY))
        super().__init__(cluster, *every, *script, nodes="2", meeting=endpoint(*cluster.hosts), flags=flags)
        self.waiting: dict[int, subprocess.Popen[bytes]] = {}
        self.launch(0, 1)
        self.do_steps(EVERY + 6)

    def park(self, number: int, phase: str = "") -> Path:
        """Start a spare; returns a folder where it notes that it has come to a phase, and waits until it may go on."""
        folder = self.out / f"pause-{number}"
        folder.mkdir()
        pause = {"PHASE": phase, "FOLDER": str(folder), "NTH": "1"}
        environment = {f"NODES_PAUSE_{name}": value for name, value in pause.items()}
        flags = ("--fast-events", str(self.out / f"events.{number}"))
        self.launch(number, flags=flags, **({"PYTHONPATH": PAUSES} | environment if phase else {}))
        self.waiting[number] = self.agents.pop(number)
        return folder

    def events(self, number: int, name: str) -> list[Line]:
        return [line for line in whole_lines(self.out / f"events.{number}") if line["event"] == name]

    def prefetched(self, number: int) -> Line:
        """What a spare has prefetched just now, when a host of which it had an older save has made another."""
        before = len(self.events(number, "prefetched")) or 1
        self.until(lambda: len(self.events(number, "prefetched")) > before, f"spare {number} has prefetched anew")
        found = self.events(number, "prefetched")[-1]
        self.until(lambda: digests(self, "saving", found["step"]), "its digest is known")
        return found

    def taken_over(self, lost: int, at: float, number: int) -> Recovery:
        """Wait until a spare trains with the rank of a lost host."""
        self.agents[number] = self.waiting.pop(number)
        recovery = self.recovered(at)
        assert recovery.ranks == {1 - lost: 1 - lost, number: lost} and recovery.lost <= 2 * EVERY
        assert recovery.tiers == {1 - lost: "memory", number: "peer"}
        assert_same_state(self, recovery.step)
        return recovery

    def finish(self) -> None:
        self.agents |= self.waiting
        end(self)


def host_of(prefetched: Line) -> int:
    return int(prefetched["host"].removeprefix("node"))


def test_a_spare_takes_over_from_what_it_has_prefetched(new_cluster: NewCluster) -> None:
    """No large file comes over the network then."""
    job = SpareJob(new_cluster, *SCRIPT)
    job.park(SPARE)
    prefetched = job.prefetched(SPARE)
    lost = host_of(prefetched)
    recovery = job.taken_over(lost, job.lose(lost), SPARE)
    (fetched,) = job.events(SPARE, "fetched")
    assert fetched["step"] == recovery.step == prefetched["step"] and fetched["bytes"] < SMALL < fetched["kept"]
    job.finish()


@campaign
def test_a_spare_that_has_prefetched_trains_on_bitwise(new_cluster: NewCluster, uninterrupted: Uninterrupted) -> None:
    script = (*SHAPE, "--steps", "80")
    job = SpareJob(new_cluster, *script, "--digests", "--pace", "0.3", "--disk", NEVER)
    job.park(SPARE)
    lost = host_of(job.prefetched(SPARE))
    job.taken_over(lost, job.lose(lost), SPARE)
    assert job.events(SPARE, "fetched")[0]["kept"] > SMALL
    job.finish()
    assert_bitwise(job, uninterrupted(*script, ranks=2))


@campaign
def test_what_no_host_has_copied_is_in_the_spare(new_cluster: NewCluster) -> None:
    """Without a spare the loss would cost what is not on storage."""
    job = SpareJob(new_cluster, *SCRIPT, copies="0")
    job.park(SPARE)
    prefetched = job.prefetched(SPARE)
    lost = host_of(prefetched)
    assert job.taken_over(lost, job.lose(lost), SPARE).step == prefetched["step"]
    job.finish()


@campaign
def test_a_spare_takes_the_rank_of_another_host_than_it_has_prefetched_of(new_cluster: NewCluster) -> None:
    job = SpareJob(new_cluster, *SCRIPT)
    job.park(SPARE)
    lost = 1 - host_of(job.prefetched(SPARE))
    job.taken_over(lost, job.lose(lost), SPARE)
    (fetched,) = job.events(SPARE, "fetched")
    assert fetched["kept"] == 0 and fetched["bytes"] > SMALL
    job.finish()


@campaign
def test_a_spare_that_is_killed_while_it_prefetches_is_followed_by_another(new_cluster: NewCluster) -> None:
    """Training goes on meanwhile; the next agent on that host removes what the dead one has left."""
    job = SpareJob(new_cluster, *SCRIPT)
    reached = job.park(SPARE, PREFETCH) / "reached"
    job.until(reached.exists, "the spare prefetches")
    job.agents[SPARE] = job.waiting.pop(SPARE)
    job.kill_node(SPARE)
    job.do_steps(EVERY)
    job.park(NEXT)
    lost = host_of(job.prefetched(NEXT))
    job.taken_over(lost, job.lose(lost), NEXT)
    assert len([line for line in job.lines(1 - lost) if line["what"] == "started"]) == 2
    job.finish()


@campaign
def test_a_spare_that_is_killed_while_it_takes_over_is_followed_by_another(new_cluster: NewCluster) -> None:
    """Both have prefetched of one host."""
    job = SpareJob(new_cluster, *SCRIPT)
    reached = job.park(SPARE, FETCH) / "reached"
    job.until(lambda: job.events(SPARE, "prefetched"), "the first one prefetches")
    job.park(NEXT)
    lost = host_of(job.prefetched(NEXT))
    at = job.lose(lost)
    job.until(reached.exists, "the spare fetches what it lacks")
    job.agents[SPARE] = job.waiting.pop(SPARE)
    job.kill_node(SPARE)
    job.taken_over(lost, at, NEXT)
    job.finish()


@campaign
def test_a_spare_takes_over_at_once_when_the_source_of_its_prefetch_is_lost(new_cluster: NewCluster) -> None:
    """What it lacks then comes from the partner of the lost host."""
    job = SpareJob(new_cluster, *SCRIPT)
    job.park(NEXT)
    lost = host_of(job.prefetched(NEXT))  # of both the same
    job.agents[NEXT] = job.waiting.pop(NEXT)
    job.kill_node(NEXT)
    folder = job.park(SPARE, PREFETCH)
    job.until((folder / "reached").exists, "the spare prefetches")
    job.taken_over(lost, job.lose(lost), SPARE)
    assert job.events(SPARE, "prefetched") == [] and job.events(SPARE, "fetched")[0]["bytes"] > SMALL
    (folder / "go").touch()
    job.finish()
