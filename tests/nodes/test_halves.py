"""Jobs whose hosts lose sight of each other, in two halves which both reach the checkpoint directory."""

import time

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import name_of
from tests.nodes.job import NodesJob

WAITS = "waiting without workers for process"


def split(fleet: Fleet) -> tuple[NodesJob, int, int]:
    """A job of two hosts, each with the place for a store of its own, that are split: who goes on, and who waits."""
    job = fleet.started((0, 1), "--memory", "5", "--disk", "10", "--batches", "2", nodes="1:2", stores=(0, 1))
    job.cluster.split(1)
    waits = job.until(lambda: [each for each in (0, 1) if WAITS in job.output(each)], "one that waits")
    assert len(waits) == 1, "both wait"
    return job, 1 - waits[0], waits[0]


def does_steps(job: NodesJob, number: int, more: int) -> None:
    goal = job.reached() + more
    job.until(lambda: max(job.steps(number)) >= goal, f"step {goal}")


def test_of_two_halves_one_goes_on_and_the_other_joins_it(fleet: Fleet) -> None:
    """It has made nothing durable since it lost the directory, and has said who has it."""
    job, goes_on, waits = split(fleet)
    done = len(job.steps(waits))
    does_steps(job, goes_on, 25)
    assert len(job.steps(waits)) == done and not job.agents[waits].poll()
    since = time.monotonic()
    job.cluster.join(1)
    job.recovered(since)
    job.do_steps(15)
    job.end()
    told = job.output(waits).partition(WAITS)[2].partition(",")[0]
    assert told.endswith(f"on {name_of(goes_on)}"), told
    lines = job.events(waits)
    lost = next(line["monotonic"] for line in lines if line["event"] == "superseded")
    meetings = [line for line in lines if line["event"] == "rendezvous" and line["monotonic"] > lost]
    back = next(line["monotonic"] for line in meetings if line["nodes"] == 2)
    saves = [line for line in lines if line["event"] in ("persisted", "flush_done")]
    assert saves, "it has saved before or after"
    assert not [line for line in saves if lost < line["monotonic"] < back]
    assert "has been taken by other nodes of this job, which opened history 2: process" in job.output(waits)
    fleet.compare(job, ranks=1)


@pytest.mark.campaign
def test_a_half_that_waits_ends_well_with_the_other_one_and_runs_no_end_of_its_own(fleet: Fleet) -> None:
    job, goes_on, waits = split(fleet)
    done, starts = job.steps(waits), job.starts(waits)
    does_steps(job, goes_on, 12)
    job.end()
    assert job.steps(waits) == done and job.starts(waits) == starts
    assert "this node waited without workers until the other nodes had ended the job" in job.output(waits)
    assert "is in memory only" not in job.output(waits)
    ends = [line for number in (0, 1) for line in job.lines(number) if line["what"] == "ended"]
    assert len(ends) == 1
    for host in job.cluster.hosts.values():
        assert not host.run("ls", "/dev/shm"), "memory of the half that waited is kept for nobody"
