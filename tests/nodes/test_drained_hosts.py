"""Hosts that an operator drains, as in docs/operate/live_page.md, and takes back in."""

import json
import re
import time
from collections.abc import Sequence

from tests.cli.test_output import KEYS
from tests.nodes.conftest import NewCluster, Uninterrupted
from tests.nodes.hosts import name_of
from tests.nodes.job import DEADLINE, NodesJob, endpoint
from tests.nodes.test_lost_hosts import EVERY, SOON, campaign
from tests.nodes.test_restarts import assert_bitwise, starts
from tests.nodes.test_spares import _waits

PORT = "9400"
COMMAND = "from fastckpt_run.commands import tools; tools()"
LINK = re.compile(r"http://127\.0\.0\.1:9400/#token=\S+")


def output(job: NodesJob, number: int) -> str:
    return (job.out / f"output.{name_of(number)}").read_text(errors="replace")


def drain(job: NodesJob, at: int, *arguments: str) -> tuple[int, str]:
    """The exit code of a command on a host whose agent serves the page, and what it prints."""
    link = LINK.findall(output(job, at))[-1]
    path = job.out / "drain"
    path.unlink(missing_ok=True)
    process = job.cluster.hosts[at].start("-c", COMMAND, "drain", *arguments, link, output=path)
    return process.wait(DEADLINE), path.read_text()


def started(new_cluster: NewCluster, nodes: str, members: Sequence[int], *flags: str) -> NodesJob:
    job = NodesJob(
        new_cluster(*members), "--memory", str(EVERY), "--batches", "6", nodes=nodes,
        meeting=endpoint(*members), flags=("--fast-metrics-port", PORT, *flags),
    )  # fmt: skip
    job.launch(*members)
    job.do_steps(EVERY + 6)
    return job


def test_a_drained_host_is_left_out_until_it_is_taken_back_in(new_cluster: NewCluster) -> None:
    """The job goes on without it, for there may be two hosts."""
    job = started(new_cluster, "2:3", (0, 1, 2), "--rdzv-conf", "last_call_timeout=3")
    at = job.reached()
    since = job.launch()  # which launches nothing, and tells the time
    out = job.agents.pop(1)
    code, said = drain(job, 0, "node1")
    found = re.search(r"node1 is drained: step (\d+) is durable; the job goes on with 2 nodes\n", said)
    assert code == 0 and found and int(found[1]) >= at - 2 * EVERY, said
    recovery = job.recovered(since, SOON)
    assert recovery.tiers == {0: "memory", 2: "memory"} and recovery.starts == {0: 1, 2: 1}
    assert recovery.step >= int(found[1])
    job.do_steps(5)

    # Twice, unknown, and one too many.
    assert drain(job, 0, "node1") == (0, "node1 is drained already\n")
    code, said = drain(job, 0, "node1", "--json")
    assert code == 0 and set(json.loads(said)) == set(KEYS["drain"]) and json.loads(said)["outcome"] == "known"
    code, said = drain(job, 0, "node7")
    assert (code, said) == (1, "no node of the job is on node7; there are: node0, node1, node2\n")
    code, said = drain(job, 0, "node2")
    assert code == 1 and "node2 is not drained: the job needs 2 nodes (--nnodes), and without node2 it would" in said
    code, said = drain(job, 0, "--undo", "node2")
    assert (code, said) == (1, "node2 is not drained; drained are: node1\n")

    # Its agent waits; another one on that host waits as well, and ends no round.
    assert out.poll() is None and "this host is drained: it waits" in output(job, 1)
    job.cluster.hosts[1].kill_all()
    out.wait(DEADLINE)
    job.launch(1)
    out = job.agents.pop(1)
    before = [starts(job, number) for number in (0, 2)]
    job.until(lambda: output(job, 1).count("this host is drained") == 2, "the next agent of host 1 waits")
    job.do_steps(20)
    assert [starts(job, number) for number in (0, 2)] == before

    since = job.launch()
    job.agents[1] = out
    assert drain(job, 0, "--undo", "node1") == (0, "node1 is back in the job\n")
    assert job.recovered(since).starts == {0: 1, 1: 1, 2: 1}
    job.do_steps(5)
    job.end()


def test_a_spare_takes_the_place_of_a_host_that_is_drained(
    new_cluster: NewCluster, uninterrupted: Uninterrupted
) -> None:
    job = started(new_cluster, "2", (0, 1), "--fast-spares", "1")
    code, said = drain(job, 0, "node1")
    assert code == 1 and "with 0 that wait for a place" in said and "Start another node first" in said, said
    job.cluster.add(2)
    events = job.cluster.folder / "events.2"
    job.launch(2, flags=("--fast-events", str(events)))
    spare = job.agents.pop(2)
    job.until(lambda: _waits(events), "the spare waits")
    since, drained = job.launch(), job.agents.pop(1)
    job.agents[2] = spare
    code, said = drain(job, 0, "node1")
    assert code == 0 and said.endswith("the job goes on with 2 nodes, with node2 in its place\n"), said
    recovery = job.recovered(since, SOON)
    assert recovery.ranks == {0: 0, 2: 1} and recovery.tiers[0] == "memory"
    # It is no spare: when the one in its place is lost, the job waits.
    before = starts(job, 1)
    job.lose(2)
    time.sleep(8)  # a spare would have taken over by then
    assert starts(job, 1) == before
    job.agents[1] = drained
    since = job.launch()
    assert drain(job, 0, "--undo", "node1")[0] == 0
    assert job.recovered(since).ranks == {0: 0, 1: 1}
    job.do_steps(5)
    job.end()
    assert_bitwise(job, uninterrupted("--batches", "6", ranks=2))


@campaign
def test_the_first_host_with_the_store_is_drained_and_ended(new_cluster: NewCluster) -> None:
    job = started(new_cluster, "2:3", (0, 1, 2))
    since, out = job.launch(), job.agents.pop(0)
    code, said = drain(job, 0, "node0")
    assert code == 0 and "node0 is drained: " in said, said
    recovery = job.recovered(since, SOON)
    assert sorted(recovery.ranks.values()) == [0, 1] and recovery.tiers == {1: "memory", 2: "memory"}
    job.do_steps(5)
    job.cluster.lose(0)  # with the store
    out.wait(DEADLINE)
    job.do_steps(40)
    assert sorted(job.recovered(job.kill_worker(2)).ranks.values()) == [0, 1]
    job.do_steps(5)
    job.end()


@campaign
def test_a_host_that_is_lost_during_its_drain_is_left_out(new_cluster: NewCluster) -> None:
    job = started(new_cluster, "2:3", (0, 1, 2))
    since = job.freeze(1)  # its agent answers nothing, and is found to be stopped
    out = job.agents.pop(1)
    code, said = drain(job, 0, "node1")
    assert code == 0 and "node1 is drained" in said, said
    job.cluster.lose(1)
    out.wait(DEADLINE)
    job.recovered(since)
    job.cluster.add(1)
    job.launch(1)
    out = job.agents.pop(1)
    job.until(lambda: "this host is drained" in output(job, 1), "the host that comes back waits")
    job.do_steps(10)
    job.agents[1] = out
    since = job.launch()
    assert drain(job, 0, "--undo", "node1")[0] == 0
    job.recovered(since)
    job.end()


@campaign
def test_the_only_host_that_may_hold_the_store_is_not_drained(new_cluster: NewCluster) -> None:
    job = NodesJob(new_cluster(0, 1), "--memory", "5", nodes="1:2", flags=("--fast-metrics-port", PORT))
    job.launch(0, 1)
    job.do_steps(11)
    code, said = drain(job, 0, "node0")
    assert code == 1 and "node0 holds the store of the rendezvous, and no other host may" in said, said
    assert drain(job, 0, "node1")[0] == 0
    code, said = drain(job, 0, "node0")
    assert code == 1 and "the job needs 1 nodes (--nnodes), and without node0 it would have 0" in said, said
    job.end()
