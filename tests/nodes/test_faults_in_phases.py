"""Faults while a job of three hosts comes back after the loss of one: in each phase, of each kind.

One host is lost with its memory. The fresh one in its place stops where it joins the rendezvous, where its agent
fetches files from the others, or where its rank has loaded them and all ranks vote; then the fault happens.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.test_lost_hosts import EVERY, NEVER, end, started
from tests.nodes.test_restarts import assert_bitwise

PAUSES = str(Path(__file__).parent / "pauses")
JOIN, FETCH, VOTE = "rendezvous.wait", "peers.fetch", "resume.verify"
FRESH = 2
"""The host that is lost, and comes back with an empty memory."""
Fault = Callable[[NodesJob], None]


class Pause:
    """A pause of one process of a host that is launched now, when it comes to a phase for the first, or n-th, time."""

    def __init__(self, job: NodesJob, number: int, phase: str, nth: int = 1) -> None:
        self._job = job
        self._folder = job.out / f"pause-{time.monotonic_ns()}"
        self._folder.mkdir()
        pause = {"PHASE": phase, "FOLDER": str(self._folder), "NTH": str(nth)}
        job.launch(number, PYTHONPATH=PAUSES, **{f"NODES_PAUSE_{name}": value for name, value in pause.items()})
        job.until((self._folder / "reached").exists, f"phase {phase}")

    def end(self) -> None:
        (self._folder / "go").touch()


def kill_the_fresh_agent(job: NodesJob) -> None:
    job.kill_node(FRESH)
    job.launch(FRESH)


def lose_the_fresh_host(job: NodesJob) -> None:
    job.lose(FRESH)
    job.cluster.add(FRESH)
    job.launch(FRESH)


def kill_the_source(job: NodesJob) -> None:
    """That holds the store and rank 0, too."""
    job.kill_node(0)
    job.launch(0)


def kill_another_worker(job: NodesJob) -> None:
    job.kill_worker(1)


def cut_the_link(job: NodesJob) -> None:
    """Of the fresh host, for longer than nodes may be silent."""
    job.cluster.hosts[FRESH].unplug()
    time.sleep(5)
    job.cluster.hosts[FRESH].plug()


def flip_a_byte_at_the_source(job: NodesJob) -> None:
    """In each large file of the memory of the first source."""
    program = (
        "import pathlib\n"
        "for path in pathlib.Path('/dev/shm').rglob('model.pt*'):\n"
        "    with path.open('r+b') as file:\n"
        "        data = bytearray(file.read()); data[len(data) // 2] ^= 1; file.seek(0); file.write(data)\n"
        "        print(path, flush=True)\n"
    )
    flipped = job.out / "flipped"
    assert job.cluster.hosts[0].start("-c", program, output=flipped).wait(60) == 0
    assert flipped.read_text(), "the source has no such file"


def come_back(job: NodesJob, phase: str, fault: Fault) -> None:
    """Lose a host; have the fault happen while the fresh one in its place is in a phase; wait until all train."""
    at = job.lose(FRESH)
    job.cluster.add(FRESH)
    pause = Pause(job, FRESH, phase)
    fault(job)
    pause.end()
    recovery = job.recovered(at)
    assert recovery.lost <= EVERY
    job.do_steps(EVERY + 6)


def job_of_three(new_cluster: NewCluster) -> NodesJob:
    return started(new_cluster(0, 1, 2), "--disk", NEVER, meeting=endpoint(0, 1, 2))


def test_a_job_comes_back_from_memory_through_a_fault_in_each_phase(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    """Nothing is on storage: what memory lacks is lost."""
    job = job_of_three(new_cluster)
    come_back(job, JOIN, kill_the_fresh_agent)
    come_back(job, FETCH, flip_a_byte_at_the_source)
    come_back(job, VOTE, kill_another_worker)
    end(job)
    assert "was not fetched from" in job.text(1 << 20)
    assert_bitwise(job, uninterrupted(ranks=3))


FAULTS = [kill_the_fresh_agent, lose_the_fresh_host, kill_the_source, kill_another_worker, cut_the_link]
CASES = [(phase, fault) for phase in (JOIN, FETCH, VOTE) for fault in FAULTS]
CASES.remove((JOIN, kill_another_worker))  # while hosts meet, no worker runs


@pytest.mark.campaign
@pytest.mark.parametrize(("phase", "fault"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_job_comes_back_from_memory_through_each_fault_in_each_phase(
    new_cluster: NewCluster, uninterrupted: Uninterrupted, phase: str, fault: Fault
) -> None:
    job = job_of_three(new_cluster)
    come_back(job, phase, fault)
    end(job)
    assert_bitwise(job, uninterrupted(ranks=3))
