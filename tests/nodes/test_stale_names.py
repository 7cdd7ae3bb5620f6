"""Hosts that have old addresses of others, in /etc/hosts or DNS: they come to the job all the same."""

from collections.abc import Collection

from tests.nodes.conftest import NewCluster
from tests.nodes.hosts import HOSTS, Cluster, address_of, name_of
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.test_lost_hosts import EVERY, SOON, campaign
from tests.nodes.test_newcomers import LAST_CALL, LONG, output


def forget(cluster: Cluster, number: int, names: Collection[int]) -> None:
    """Have a host know addresses of others that nobody has any more."""
    old = {each: HOSTS - 1 - each for each in names}
    known = "".join(f"{address_of(old.get(each, each))} {name_of(each)}\n" for each in range(HOSTS))
    (cluster.folder / name_of(number) / "hosts").write_text(f"127.0.0.1 localhost\n{known}")


def joined(new_cluster: NewCluster, *endpoints: int, stale: Collection[int]) -> NodesJob:
    """A job of two hosts, to which host 2 has come in seconds, though it has old addresses of some."""
    cluster = new_cluster(0, 1, 2)
    script = ("--memory", str(EVERY), *LONG)
    job = NodesJob(cluster, *script, nodes="2:3", meeting=endpoint(*endpoints), flags=LAST_CALL)
    job.launch(0, 1)
    job.do_steps(16)
    forget(cluster, 2, stale)
    recovery = job.recovered(job.launch(2), 2 * SOON)
    assert recovery.ranks == {0: 0, 1: 1, 2: 2} and recovery.starts == {0: 1, 1: 1, 2: 1}
    job.do_steps(5)
    return job


def test_a_host_that_may_hold_the_store_and_has_old_addresses_of_all_others_joins(new_cluster: NewCluster) -> None:
    job = joined(new_cluster, 0, 1, 2, stale=(0, 1))
    said = f"by node0, node1: the others meet on host node0, at {address_of(0)}:29400, as that one has noted in"
    assert output(job, 2).count(said) == 1, output(job, 2)
    assert all("reaches nobody of its job" not in output(job, number) for number in (0, 1))
    job.end()


@campaign
def test_a_host_with_old_addresses_of_all_others_goes_on_with_them_when_the_store_is_lost(
    new_cluster: NewCluster,
) -> None:
    job = joined(new_cluster, 0, 1, 2, stale=(0, 1))
    recovery = job.recovered(job.lose(0), SOON)
    assert recovery.ranks == {1: 1, 2: 0} and recovery.lost <= EVERY
    job.do_steps(5)
    job.cluster.add(0)
    recovery = job.recovered(job.launch(0), SOON)
    assert sorted(recovery.ranks.values()) == [0, 1, 2]
    job.end()


@campaign
def test_a_host_with_an_old_address_of_the_one_with_the_first_rank_joins(new_cluster: NewCluster) -> None:
    job = joined(new_cluster, 1, stale=(0,))
    assert "reaches nobody of its job" not in output(job, 2)
    job.end()
