"""Hosts that an operator drains, as in docs/operate/live_page.md, and takes back in."""

import json
import re

import pytest

from tests.cli.test_output import KEYS
from tests.nodes.conftest import Fleet
from tests.nodes.job import DEADLINE, EVERY, LAST_CALL, SOON, NodesJob

PORT = "9400"
COMMAND = "from fastckpt_run.commands import tools; tools()"
LINK = re.compile(r"http://127\.0\.0\.1:9400/#token=\S+")


def drain(job: NodesJob, *arguments: str) -> tuple[int, str]:
    """The exit code of a command on the first host, whose agent serves the page, and what it prints."""
    link, path = LINK.findall(job.output(0))[-1], job.out / "drain"
    path.unlink(missing_ok=True)
    process = job.cluster.hosts[0].start("-c", COMMAND, "drain", *arguments, link, output=path)
    return process.wait(DEADLINE), path.read_text()


def started(fleet: Fleet, *flags: str) -> NodesJob:
    flags = ("--fast-metrics-port", PORT, *flags)
    script = ("--batches", "6", "--steps", "100000")
    return fleet.started((0, 1, 2), *script, nodes="2:3", stores=(0, 1, 2), flags=flags)


def test_a_drained_host_is_left_out_until_it_is_taken_back_in(fleet: Fleet) -> None:
    """The job goes on without it, for there may be two hosts."""
    job = started(fleet, *LAST_CALL)
    at, since = job.reached(), job.set_aside(1)
    code, said = drain(job, "node1")
    found = re.search(r"node1 is drained: step (\d+) is durable; the job goes on with 2 nodes\n", said)
    assert code == 0 and found and int(found[1]) >= at - 2 * EVERY, said
    recovery = job.recovered(since, SOON)
    assert recovery.tiers == {0: "memory", 2: "memory"} and recovery.starts == {0: 1, 2: 1}
    assert recovery.step >= int(found[1])
    job.do_steps(5)

    # Twice, unknown, and one too many.
    assert drain(job, "node1") == (0, "node1 is drained already\n")
    code, said = drain(job, "node1", "--json")
    assert code == 0 and set(json.loads(said)) == set(KEYS["drain"]) and json.loads(said)["outcome"] == "known"
    assert drain(job, "node7") == (1, "no node of the job is on node7; there are: node0, node1, node2\n")
    code, said = drain(job, "node2")
    assert code == 1 and "node2 is not drained: the job needs 2 nodes (--nnodes), and without node2 it would" in said
    assert drain(job, "--undo", "node2") == (1, "node2 is not drained; drained are: node1\n")

    # Its agent waits; another one on that host waits as well, and ends no round.
    out = job.waiting.pop(1)
    assert out.poll() is None and "this host is drained: it waits" in job.output(1)
    job.cluster.hosts[1].kill_all()
    out.wait(DEADLINE)
    before = [job.starts(number) for number in (0, 2)]
    job.launch(1)
    job.set_aside(1)
    job.until(lambda: job.output(1).count("this host is drained") == 2, "the next agent waits")
    job.do_steps(20)
    assert [job.starts(number) for number in (0, 2)] == before
    since = job.count_on(1)
    assert drain(job, "--undo", "node1")[0] == 0
    assert job.recovered(since).starts == {0: 1, 1: 1, 2: 1}
    job.finish()


@pytest.mark.campaign
def test_the_first_host_with_the_store_is_drained_and_ended(fleet: Fleet) -> None:
    job = started(fleet)
    since = job.set_aside(0)
    code, said = drain(job, "node0")
    assert code == 0 and "node0 is drained: " in said, said
    recovery = job.recovered(since, SOON)
    assert sorted(recovery.ranks.values()) == [0, 1] and recovery.tiers == {1: "memory", 2: "memory"}
    job.do_steps(5)
    job.cluster.lose(0)  # with the store
    job.waiting.pop(0).wait(DEADLINE)
    job.do_steps(40)
    assert sorted(job.recovered(job.kill_worker(2)).ranks.values()) == [0, 1]
    job.finish()
