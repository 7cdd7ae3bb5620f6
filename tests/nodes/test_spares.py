"""Jobs with a spare host, as in docs/clusters/nodes.md: it takes the rank of one that is lost, or fails twice."""

from tests.json_lines import whole_lines
from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.test_restarts import assert_bitwise

SOON = 30.0
"""Seconds for what takes up to 4 on a quiet machine."""


def test_a_spare_takes_the_rank_of_a_host_that_failed_twice_and_gives_it_back_when_it_is_lost(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    cluster = new_cluster(0, 1, 2)
    job = NodesJob(cluster, nodes="2", meeting=endpoint(0, 1, 2), flags=("--fast-spares", "1"))
    job.launch(0, 1)
    job.do_steps(10)
    events = cluster.folder / "events.2"
    job.launch(2, flags=("--fast-events", str(events)))
    spare = job.agents.pop(2)
    job.until(lambda: any(line["event"] == "waits_as_spare" for line in whole_lines(events)), "the spare waits")
    job.do_steps(5)

    # A host that fails for the second time gives its place to the spare, and waits itself.
    first = job.recovered(job.kill_worker(1), SOON)
    assert (first.ranks, first.starts) == ({0: 0, 1: 1}, {0: 1, 1: 1})
    job.do_steps(5)
    killed = job.kill_worker(1)
    bad, job.agents[2] = job.agents.pop(1), spare
    recovery = job.recovered(killed, SOON)
    assert recovery.ranks == {0: 0, 2: 1} and recovery.starts == {0: 1, 2: 1}
    assert recovery.tiers == {0: "memory", 2: "peer"} and recovery.lost <= 2
    assert (
        "host node1 is left out while a spare waits: it failed 2 times, and no other for the same cause" in job.text()
    )
    job.do_steps(5)

    # When the spare is lost with its memory, nobody else is left.
    lost = job.lose(2)
    job.agents[1] = bad
    recovery = job.recovered(lost, SOON)
    assert recovery.ranks == {0: 0, 1: 1} and recovery.tiers[0] == "memory" and recovery.lost <= 2
    job.do_steps(5)
    job.end()
    assert_bitwise(job, uninterrupted(ranks=2))
