"""Hosts that come to a running job and do not fit it: each is told why, and the others train on.

Hosts that have old addresses of others, in /etc/hosts or DNS, come to it all the same.
"""

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import HOSTS, address_of, name_of
from tests.nodes.job import DEADLINE, LAST_CALL, SOON, NodesJob

LONG = ("--steps", "100000")


def refused(job: NodesJob, number: int, *flags: str) -> str:
    """Why a host is refused that has this command line; the others train on, and none of their workers was started."""
    before, length = [job.starts(each) for each in job.agents], len(job.output(number))
    job.launch(number, flags=flags)
    assert job.agents.pop(number).wait(DEADLINE) == 2, job.text()
    job.do_steps(10, SOON)
    assert [job.starts(each) for each in job.agents] == before, job.text()
    text = job.output(number)[length:]
    assert "Traceback" not in text
    return text[text.index("fastckpt-run: error: ") :]


def test_hosts_with_another_directory_are_refused_by_name_and_one_that_fits_joins(fleet: Fleet) -> None:
    job = fleet.job((0, 1, 2), *LONG, nodes="1:3", stores=(0, 1), flags=LAST_CALL)
    job.launch(0, 1)
    job.do_steps(100)  # so many that what it knows of its directory was announced
    cluster, script = job.cluster, job._script
    elsewhere, another = cluster.folder / "elsewhere", cluster.folder / "another"
    elsewhere.mkdir()
    cluster.hosts[2].run("mount", "--bind", str(elsewhere), str(cluster.storage))
    assert f"error: {cluster.storage} is not the checkpoint directory of the job on this node" in refused(job, 2)
    cluster.hosts[2].run("umount", str(cluster.storage))
    job._script = [str(another) if each == str(cluster.storage) else each for each in script]
    assert f"--checkpoint-dir is {another} on this node, and the job" in refused(job, 2)
    assert not another.exists()
    job._script = script
    assert "--fast-replicas is xor:3 on this node, and auto on" in refused(job, 2, "--fast-replicas", "xor:3")
    assert "error:" not in job.output(0) + job.output(1)
    assert job.recovered(job.launch(2)).ranks == {0: 0, 1: 1, 2: 2}
    job.finish()


@pytest.mark.campaign
def test_a_host_that_may_hold_the_store_and_has_old_addresses_of_all_others_joins(fleet: Fleet) -> None:
    job = fleet.job((0, 1, 2), *LONG, nodes="2:3", stores=(0, 1, 2), flags=LAST_CALL)
    job.launch(0, 1)
    job.do_steps(16)
    addresses = {number: address_of(HOSTS - 1 - number if number < 2 else number) for number in range(HOSTS)}
    known = "".join(f"{address} {name_of(number)}\n" for number, address in addresses.items())
    (job.cluster.folder / "node2/hosts").write_text(f"127.0.0.1 localhost\n{known}")
    recovery = job.recovered(job.launch(2), 2 * SOON)
    assert recovery.ranks == {0: 0, 1: 1, 2: 2} and recovery.starts == {0: 1, 1: 1, 2: 1}
    job.do_steps(5)
    said = f"by node0, node1: the others meet on host node0, at {address_of(0)}:29400, as that one has noted in"
    assert job.output(2).count(said) == 1, job.output(2)
    assert all("reaches nobody of its job" not in job.output(number) for number in (0, 1))
    job.end()
