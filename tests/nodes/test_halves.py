"""Jobs whose hosts lose sight of each other, in two halves which both reach the checkpoint directory."""

import pytest

from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.hosts import name_of
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.recovery import Line
from tests.nodes.test_restarts import assert_bitwise, starts
from tests.support.json_lines import whole_lines

SAVES = ("--memory", "5", "--disk", "10")
WAITS = "waiting without workers for process"
campaign = pytest.mark.campaign


def events(job: NodesJob, number: int) -> list[Line]:
    """What the agent of a host has reported."""
    logs = (job.cluster.storage / ".fastckpt" / "events").glob(f"*-{name_of(number)}-*")
    return [line for path in logs for line in whole_lines(path)]


def output(job: NodesJob, number: int) -> str:
    return (job.out / f"output.{name_of(number)}").read_text(errors="replace")


def steps(job: NodesJob, number: int) -> list[int]:
    return [line["step"] for line in job.lines(number) if line["what"] == "step"]


def split(job: NodesJob, *halves: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split the hosts in two halves; who goes on, and who waits."""
    job.cluster.split(*halves[1])

    def waiting() -> list[tuple[int, ...]]:
        return [half for half in halves if any(WAITS in output(job, number) for number in half)]

    waits = job.until(waiting, "a half that waits")
    assert len(waits) == 1, "both halves wait"
    (goes_on,) = (half for half in halves if half != waits[0])
    return goes_on, waits[0]


def goes_on_alone(job: NodesJob, going: tuple[int, ...], waiting: tuple[int, ...]) -> None:
    """See that one half makes steps, and makes them durable, while the other has no workers."""
    done = {number: len(steps(job, number)) for number in waiting}
    goal = job.reached() + 25
    job.until(lambda: all(max(steps(job, number)) >= goal for number in going), f"step {goal}")
    assert {number: len(steps(job, number)) for number in waiting} == done
    assert waiting == tuple(number for number in waiting if job.agents[number].poll() is None)


def join(job: NodesJob, *halves: tuple[int, ...]) -> None:
    """Undo the split: all hosts are in one round again, and end well."""
    since = job.launch()  # which launches nothing, and tells the time
    job.cluster.join(*halves[1])
    job.recovered(since)
    job.do_steps(15)
    job.end()


def assert_one_half_saved(job: NodesJob, going: tuple[int, ...], waiting: tuple[int, ...]) -> None:
    """The other half has made nothing durable since it lost the directory, and has said who has it."""
    for number in waiting:
        told = output(job, number).partition(WAITS)[2].partition(",")[0]
        assert any(told.endswith(f"on {name_of(each)}") for each in going), told
        lines = events(job, number)
        lost = next(line["monotonic"] for line in lines if line["event"] == "superseded")
        meetings = [line for line in lines if line["event"] == "rendezvous" and line["monotonic"] > lost]
        back = next(line["monotonic"] for line in meetings if line["nodes"] == len(job.cluster.hosts))
        saves = [line for line in lines if line["event"] in ("persisted", "flush_done")]
        assert saves, "it has saved before or after"
        assert not [line for line in saves if lost < line["monotonic"] < back]
        assert "has been taken by other nodes of this job, which opened history 2: process" in output(job, number)


def test_of_two_halves_one_goes_on_and_the_other_joins_it(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    """Each has the place for a store of its own, and the checkpoint directory."""
    job = NodesJob(new_cluster(0, 1), *SAVES, "--batches", "2", nodes="1:2", meeting=endpoint(0, 1))
    job.launch(0, 1)
    job.do_steps(16)
    going, waiting = split(job, (0,), (1,))
    goes_on_alone(job, going, waiting)
    join(job, (0,), (1,))
    assert_one_half_saved(job, going, waiting)
    assert_bitwise(job, uninterrupted("--batches", "2", ranks=1))


def test_a_half_that_waits_ends_well_with_the_other_one_and_runs_no_end_of_its_own(new_cluster: NewCluster) -> None:
    job = NodesJob(new_cluster(0, 1), *SAVES, "--batches", "2", nodes="1:2", meeting=endpoint(0, 1))
    job.launch(0, 1)
    job.do_steps(16)
    (goes_on,), (waits,) = split(job, (0,), (1,))
    done, started = steps(job, waits), starts(job, waits)
    goal = job.reached() + 12
    job.until(lambda: max(steps(job, goes_on)) >= goal, f"step {goal}")
    job.end()
    assert steps(job, waits) == done and starts(job, waits) == started
    assert "this node waited without workers until the other nodes had ended the job" in output(job, waits)
    assert "is in memory only" not in output(job, waits)
    ends = [line for number in (0, 1) for line in job.lines(number) if line["what"] == "ended"]
    assert len(ends) == 1
    for host in job.cluster.hosts.values():
        assert not host.run("ls", "/dev/shm"), "memory of the half that waited is kept for nobody"


@campaign
def test_a_half_that_waits_goes_on_when_the_other_one_fails(new_cluster: NewCluster) -> None:
    job = NodesJob(new_cluster(0, 1), *SAVES, "--batches", "2", nodes="1:2", meeting=endpoint(0, 1))
    job.launch(0, 1)
    job.do_steps(16)
    (goes_on,), (waits,) = split(job, (0,), (1,))
    failed = job.kill_node(goes_on)
    recovery = job.recovered(failed)
    assert recovery.ranks == {waits: 0}
    job.do_steps(5)
    job.end()


@campaign
@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_host_that_is_cut_off_from_two_others_waits_for_them(new_cluster: NewCluster, waits: int) -> None:
    """Also the one that held the store and had rank 0: fewer than half of the hosts leave the others time."""
    others = tuple(number for number in (0, 1, 2) if number != waits)
    job = NodesJob(new_cluster(0, 1, 2), *SAVES, nodes="1:3", meeting=endpoint(0, 1, 2))
    job.launch(0, 1, 2)
    job.do_steps(16)
    going, waiting = split(job, others, (waits,))
    assert waiting == (waits,)
    goes_on_alone(job, going, waiting)
    join(job, others, (waits,))
    assert_one_half_saved(job, going, waiting)


@campaign
def test_a_host_that_is_too_few_without_the_others_joins_them_when_it_reaches_them(new_cluster: NewCluster) -> None:
    """It waits for a second host in a store of its own."""
    job = NodesJob(new_cluster(0, 1, 2), *SAVES, nodes="2:3", meeting=endpoint(0, 1, 2))
    job.launch(0, 1, 2)
    job.do_steps(16)
    job.cluster.split(0)
    goal = job.reached() + 25
    job.until(lambda: all(max(steps(job, number)) >= goal for number in (1, 2)), f"step {goal}")
    assert max(steps(job, 0)) < goal
    join(job, (1, 2), (0,))


@campaign
@pytest.mark.parametrize("halves", [((0, 1), (2, 3)), ((0, 2), (1, 3))])
def test_two_of_four_hosts_go_on_and_the_other_two_join_them(
    new_cluster: NewCluster, halves: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    job = NodesJob(new_cluster(0, 1, 2, 3), *SAVES, nodes="2:4", meeting=endpoint(0, 1, 2, 3))
    job.launch(0, 1, 2, 3)
    job.do_steps(16)
    going, waiting = split(job, *halves)
    goes_on_alone(job, going, waiting)
    join(job, *halves)
    assert any("has been taken by other nodes of this job" in output(job, number) for number in waiting)
