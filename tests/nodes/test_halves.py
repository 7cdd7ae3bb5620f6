"""Jobs whose hosts lose sight of each other, in two halves which both reach the checkpoint directory."""

import time

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import name_of
from tests.nodes.job import NodesJob

WAITS = "waiting without workers for process"
Half = tuple[int, ...]
campaign = pytest.mark.campaign


def started(fleet: Fleet, hosts: int, nodes: str) -> NodesJob:
    """Each has the place for a store of its own, and the checkpoint directory."""
    batches = ("--batches", "2") if hosts == 2 else ()
    return fleet.started(range(hosts), "--memory", "5", "--disk", "10", *batches, nodes=nodes, stores=range(hosts))


def split(job: NodesJob, *halves: Half) -> tuple[Half, Half]:
    """Split the hosts in two halves; who goes on, and who waits."""
    job.cluster.split(*halves[1])

    def waiting() -> list[Half]:
        return [half for half in halves if any(WAITS in job.output(number) for number in half)]

    waits = job.until(waiting, "a half that waits")
    assert len(waits) == 1, "both halves wait"
    (goes_on,) = (half for half in halves if half != waits[0])
    return goes_on, waits[0]


def all_reach(job: NodesJob, nodes: Half, more: int) -> int:
    """Wait until these hosts have done so many steps more; which step that is."""
    goal = job.reached() + more
    job.until(lambda: all(max(job.steps(number)) >= goal for number in nodes), f"step {goal}")
    return goal


def join(job: NodesJob, *halves: Half) -> None:
    """Undo the split: all hosts are in one round again, and end well."""
    since = time.monotonic()
    job.cluster.join(*halves[1])
    job.recovered(since)
    job.do_steps(15)
    job.end()


def assert_one_half_saved(job: NodesJob, going: Half, waiting: Half) -> None:
    """The other half has made nothing durable since it lost the directory, and has said who has it."""
    for number in waiting:
        told = job.output(number).partition(WAITS)[2].partition(",")[0]
        assert any(told.endswith(f"on {name_of(each)}") for each in going), told
        lines = job.events(number)
        lost = next(line["monotonic"] for line in lines if line["event"] == "superseded")
        meetings = [line for line in lines if line["event"] == "rendezvous" and line["monotonic"] > lost]
        back = next(line["monotonic"] for line in meetings if line["nodes"] == len(job.cluster.hosts))
        saves = [line for line in lines if line["event"] in ("persisted", "flush_done")]
        assert saves, "it has saved before or after"
        assert not [line for line in saves if lost < line["monotonic"] < back]
        assert "has been taken by other nodes of this job, which opened history 2: process" in job.output(number)


def part_and_join(job: NodesJob, *halves: Half) -> tuple[Half, Half]:
    """Split a job: one half makes steps while the other has no workers, and joins it; which they were."""
    going, waiting = split(job, *halves)
    done = {number: len(job.steps(number)) for number in waiting}
    all_reach(job, going, 25)
    assert {number: len(job.steps(number)) for number in waiting} == done
    assert not any(job.agents[number].poll() for number in waiting)
    join(job, *halves)
    return going, waiting


def test_of_two_halves_one_goes_on_and_the_other_joins_it(fleet: Fleet) -> None:
    job = started(fleet, 2, "1:2")
    assert_one_half_saved(job, *part_and_join(job, (0,), (1,)))
    fleet.compare(job, ranks=1)


def test_a_half_that_waits_ends_well_with_the_other_one_and_runs_no_end_of_its_own(fleet: Fleet) -> None:
    job = started(fleet, 2, "1:2")
    goes_on, (waits,) = split(job, (0,), (1,))
    done, starts = job.steps(waits), job.starts(waits)
    all_reach(job, goes_on, 12)
    job.end()
    assert job.steps(waits) == done and job.starts(waits) == starts
    assert "this node waited without workers until the other nodes had ended the job" in job.output(waits)
    assert "is in memory only" not in job.output(waits)
    ends = [line for number in (0, 1) for line in job.lines(number) if line["what"] == "ended"]
    assert len(ends) == 1
    for host in job.cluster.hosts.values():
        assert not host.run("ls", "/dev/shm"), "memory of the half that waited is kept for nobody"


@campaign
def test_a_half_that_waits_goes_on_when_the_other_one_fails(fleet: Fleet) -> None:
    job = started(fleet, 2, "1:2")
    (goes_on,), (waits,) = split(job, (0,), (1,))
    assert job.recovered(job.kill_node(goes_on)).ranks == {waits: 0}
    job.finish()


@campaign
@pytest.mark.parametrize("waits", [0, 2])
def test_a_host_that_is_cut_off_from_two_others_waits_for_them(fleet: Fleet, waits: int) -> None:
    """Also the one that held the store and had rank 0: fewer than half of the hosts leave the others time."""
    job = started(fleet, 3, "1:3")
    going, waiting = part_and_join(job, tuple({0, 1, 2} - {waits}), (waits,))
    assert waiting == (waits,)
    assert_one_half_saved(job, going, waiting)


@campaign
@pytest.mark.parametrize("halves", [((0, 2), (1, 3))])
def test_two_of_four_hosts_go_on_and_the_other_two_join_them(fleet: Fleet, halves: tuple[Half, Half]) -> None:
    job = started(fleet, 4, "2:4")
    _, waiting = part_and_join(job, *halves)
    assert any("has been taken by other nodes of this job" in job.output(number) for number in waiting)
