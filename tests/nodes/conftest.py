"""Clusters that end with their test, and the losses of runs that nothing befell."""

import fcntl
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import conftest as faults
from tests.nodes.hosts import Cluster, obstacle
from tests.nodes.job import EVERY, NodesJob, endpoint
from tests.nodes.recovery import Losses
from tests.nodes.reference import losses_in, train_uninterrupted

NewCluster = Callable[..., Cluster]
Uninterrupted = Callable[..., Losses]
forked_launchers = faults.forked_launchers


@pytest.fixture
def new_cluster(tmp_path: Path, forked_launchers: None) -> Iterator[NewCluster]:
    """Makes clusters of hosts with these numbers; skips the test where this machine permits none."""
    if why := obstacle():
        pytest.skip(why)
    made: list[Cluster] = []
    names = itertools.count()

    def make(*numbers: int, **kind: bool) -> Cluster:
        made.append(Cluster(tmp_path / f"cluster-{next(names)}", *numbers, **kind))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, forked_launchers: None) -> Uninterrupted:
    """The losses of a run that nothing befell; made once, whoever of the processes of these tests asks first."""
    own = tmp_path_factory.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def losses(*script: str, ranks: int) -> Losses:
        folder = common / "-".join(["nodes", str(ranks), *(word.strip("-") for word in script)])
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "whole").exists():
                train_uninterrupted(folder, ranks, *script)
                (folder / "whole").touch()
        return losses_in(folder)

    return losses


class Fleet:
    """Makes jobs on hosts of their own, and compares them with runs that nothing befell."""

    def __init__(self, new_cluster: NewCluster, uninterrupted: Uninterrupted) -> None:
        self.new_cluster, self.uninterrupted = new_cluster, uninterrupted

    def job(
        self,
        hosts: Collection[int],
        *script: str,
        nodes: str = "",
        stores: Collection[int] = (),
        flags: Collection[str] = (),
        every: int = EVERY,
        cluster: Cluster | None = None,
    ) -> NodesJob:
        """A job of these hosts, or ``nodes``, whose store may be at some: by default, at the lowest host."""
        meeting = endpoint(*stores) if stores else ""
        saves, nodes = ("--memory", str(every)), nodes or str(len(hosts))
        return NodesJob(cluster or self.new_cluster(*hosts), *saves, *script, nodes=nodes, meeting=meeting, flags=flags)

    def started(self, hosts: Collection[int], *script: str, steps: int = EVERY + 6, **options: Any) -> NodesJob:
        """One that all of its hosts have begun, and has done some steps."""
        job = self.job(hosts, *script, **options)
        job.launch(*hosts)
        job.do_steps(steps)
        return job

    def with_spares(
        self, nodes: int, spares: int, *script: str, stores: Collection[int] = (), flags: Collection[str] = ()
    ) -> NodesJob:
        """One with hosts that wait for a place."""
        members, others = range(nodes), range(nodes, nodes + spares)
        flags = ("--fast-spares", str(spares), *flags)
        hosts = range(nodes + spares)
        job = self.job(hosts, *script, nodes=str(nodes), stores=stores or hosts, flags=flags)
        job.launch(*members)
        job.do_steps(1)
        job.park(*others)
        job.are_parked(*others)
        job.do_steps(EVERY + 6)
        return job

    def finish(self, job: NodesJob, ranks: int) -> None:
        """Have a job come to its good end: each time that a step was done it had the losses of so many ranks alone."""
        job.finish()
        self.compare(job, ranks)

    def compare(self, job: NodesJob, ranks: int) -> None:
        """The run that nothing befell is as long as that job, and shared with others of that length."""
        length = () if "--steps" in job.shape else ("--steps", str(math.ceil(job.reached() / 200) * 200))
        reference = self.uninterrupted(*job.shape, *length, ranks=ranks)
        assert job.losses() == {place: losses for place, losses in reference.items() if place[0] <= job.reached()}


@pytest.fixture
def fleet(new_cluster: NewCluster, uninterrupted: Uninterrupted) -> Fleet:
    return Fleet(new_cluster, uninterrupted)
