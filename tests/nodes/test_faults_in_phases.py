"""Faults while a job of hosts comes back after the loss of one, or copies what is divided: in each phase, of each kind.

One host stands still in a phase: where it joins the rendezvous, fetches files from others, or votes; or of its third
copy or renewal of parity, so that earlier saves have some. Then the fault happens. Without storage, nothing older than
the newest save that memory, copies or parity give back is lost.
"""

import time
from collections.abc import Callable

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.job import EVERY, NEVER, NodesJob
from tests.nodes.recovery import Line, Recovery
from tests.nodes.test_replicas import WIDE

JOIN, FETCH, VOTE = "rendezvous.wait", "peers.fetch", "resume.verify"
SEND, COMMIT = "replicas.send", "parity.commit"
THREE, FOUR = (0, 1, 2), (0, 1, 2, 3)
campaign = pytest.mark.campaign
AT = 2
"""The host that stands still; it is a fresh one, or is in a phase of a copy."""
Fault = Callable[[NodesJob], None]


class Pause:
    """A pause of one process of a host that is launched now, when it comes to a phase for the first, or n-th, time."""

    def __init__(self, job: NodesJob, number: int, phase: str, nth: int = 1, *, parks: bool = False) -> None:
        self._folder = job.out / f"pause-{time.monotonic_ns()}"
        self._folder.mkdir()
        (job.park if parks else job.launch)(number, NODES_PAUSE=f"{phase} {self._folder} {nth}")
        self._job, self._phase = job, phase

    def is_reached(self) -> "Pause":
        self._job.until((self._folder / "reached").exists, f"phase {self._phase}")
        return self

    def end(self) -> None:
        (self._folder / "go").touch()


def kill_the_agent(job: NodesJob) -> None:
    job.kill_node(AT)
    job.launch(AT)


def lose_the_host(job: NodesJob) -> None:
    job.lose(AT)
    job.add(AT)


def lose_another(job: NodesJob) -> None:
    job.lose(1)
    job.add(1)


def kill_the_source(job: NodesJob) -> None:
    """That holds the store and rank 0, too."""
    job.kill_node(0)
    job.launch(0)


def kill_another_worker(job: NodesJob) -> None:
    job.kill_worker(1)


def cut_the_link(job: NodesJob) -> None:
    """Of the host, for longer than nodes may be silent."""
    job.cluster.hosts[AT].unplug()
    time.sleep(5)
    job.cluster.hosts[AT].plug()


FLIP = """
import pathlib, sys
for path in pathlib.Path('/dev/shm').glob(sys.argv[1]):
    with path.open('r+b') as file:
        data = bytearray(file.read()); data[len(data) // 2] ^= 1; file.seek(0); file.write(data)
        print(path, flush=True)
"""


def flip(job: NodesJob, number: int, pattern: str) -> None:
    """Flip a byte of each file of the memory of a host whose path matches."""
    flipped = job.out / f"flipped.{number}"
    assert job.cluster.hosts[number].start("-c", FLIP, pattern, output=flipped).wait(60) == 0
    assert flipped.read_text(), "there is no such file"


def flip_a_byte_at_the_source(job: NodesJob) -> None:
    flip(job, 0, "**/model.pt*")


def come_back(job: NodesJob, phase: str, fault: Fault) -> Recovery:
    """Lose a host; have the fault happen while the fresh one in its place is in a phase; wait until all train."""
    at = job.lose(AT)
    job.cluster.add(AT)
    pause = Pause(job, AT, phase).is_reached()
    fault(job)
    pause.end()
    return job.recovered(at)


def resumes(job: NodesJob, number: int) -> list[Line]:
    """The loads of a host's workers that found something."""
    return [line for line in job.lines(number) if line["what"] == "loaded" and line["step"]]


# --- while a fresh host comes


FAULTS = [kill_the_agent, lose_the_host, kill_the_source, kill_another_worker, cut_the_link]
CASES = [(phase, fault) for phase in (JOIN, FETCH, VOTE) for fault in FAULTS]
CASES.remove((JOIN, kill_another_worker))  # while hosts meet, no worker runs
NAMES = {"ids": lambda value: getattr(value, "__name__", value)}


@pytest.mark.parametrize(
    ("phase", "fault"),
    [(FETCH, flip_a_byte_at_the_source), *(pytest.param(*case, marks=campaign) for case in CASES)],
    **NAMES,
)
def test_a_job_comes_back_from_memory_through_each_fault_in_each_phase(fleet: Fleet, phase: str, fault: Fault) -> None:
    """Nothing is on storage: what memory lacks is lost."""
    job = fleet.started(THREE, "--disk", NEVER, stores=THREE)
    assert come_back(job, phase, fault).lost <= EVERY
    fleet.finish(job, ranks=3)
    assert ("was not fetched from" in job.text(1 << 20)) >= (fault is flip_a_byte_at_the_source)


# --- while shards of 25 MB on each host are copied, or their parity is renewed

COPY_FAULTS = [lose_the_host, lose_another, kill_the_agent, kill_another_worker, cut_the_link]
COPY_PHASES = {"replicas.digest": 3, SEND: 3, "replicas.receive": 3}
"""And how often a host has been in it when it is amid its third copy."""
PARITY_PHASES = COPY_PHASES | {"parity.digest": 8, "parity.receive": 8, "parity.add": 8, COMMIT: 3}
"""Some are of one chunk for each other host."""
del PARITY_PHASES["replicas.receive"]
SLOWLY = (*WIDE[:4], "--steps", "60", "--pace", "0.2", "--disk", NEVER)
"""The end is not reached before the fault, wherever the job runs."""


def faulty(job: NodesJob, phase: str, nth: int, fault: Fault) -> dict[int, list[Line]]:
    """Have the fault happen while a host is in a phase; the resumes of all, which lose few steps."""
    job.launch(*(number for number in job.cluster.hosts if number != AT))
    pause = Pause(job, AT, phase, nth).is_reached()
    if phase == COMMIT:
        time.sleep(2)  # the others commit theirs
    reached = job.reached()
    fault(job)
    pause.end()
    job.until(lambda: all(resumes(job, number) for number in job.agents), "all have resumed")
    found = {number: resumes(job, number) for number in job.agents}
    assert reached - min(line["step"] for lines in found.values() for line in lines) <= 4 * EVERY
    return found


@campaign
@pytest.mark.parametrize("phase", COPY_PHASES)
@pytest.mark.parametrize("fault", COPY_FAULTS, **NAMES)
def test_a_job_comes_back_from_memory_through_each_fault_in_each_phase_of_a_copy(
    fleet: Fleet, phase: str, fault: Fault
) -> None:
    job = fleet.job(THREE, *WIDE, stores=THREE)
    found = faulty(job, phase, COPY_PHASES[phase], fault)
    assert {line["tier"] for lines in found.values() for line in lines} <= {"memory", "peer"}
    fleet.finish(job, ranks=3)


@campaign
@pytest.mark.parametrize("phase", PARITY_PHASES)
@pytest.mark.parametrize("fault", [lose_the_host, lose_another], **NAMES)
def test_a_loss_in_each_phase_of_a_renewal_of_parity_is_restored_from_memory(
    fleet: Fleet, phase: str, fault: Fault
) -> None:
    job = fleet.job(FOUR, *SLOWLY, stores=FOUR, flags=("--fast-replicas", "xor:4"))
    found = faulty(job, phase, PARITY_PHASES[phase], fault)
    lost = AT if fault is lose_the_host else 1
    tiers = {number: lines[-1]["tier"] for number, lines in found.items()}
    assert tiers == {number: "peer" if number == lost else "memory" for number in FOUR}
    fleet.finish(job, ranks=4)


@campaign
def test_the_memory_of_copies_is_there_for_the_saves_of_a_host_that_is_left_alone(fleet: Fleet) -> None:
    """It has twice as much to save then, and its memory has no room for that beside the copies of both saves."""
    cluster = fleet.new_cluster(0, 1)
    filler = "import os; file = open('/dev/shm/filler', 'wb'); os.posix_fallocate(file.fileno(), 0, 270 << 20)"
    for host in cluster.hosts.values():
        assert host.start("-c", filler, output=cluster.folder / "filled").wait(60) == 0
    job = fleet.started((0, 1), *WIDE, nodes="1:2", stores=(0, 1), cluster=cluster, steps=4 * EVERY + 6)
    recovery = job.recovered(job.lose(1))
    assert recovery.tiers == {0: "memory"} and recovery.lost <= 2 * EVERY
    job.do_steps(2 * EVERY)
    newer = [line["what"] for line in job.lines(0) if line["what"] in ("saved", "skipped") and line["world"] == 1]
    assert newer and set(newer) == {"saved"}
    job.finish()
