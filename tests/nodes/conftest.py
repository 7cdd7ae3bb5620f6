"""Clusters that end with their test, and the losses of runs that nothing befell."""

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nodes.hosts import Cluster, obstacle
from tests.nodes.recovery import Losses
from tests.nodes.reference import losses_in, train_uninterrupted

NewCluster = Callable[..., Cluster]
Uninterrupted = Callable[..., Losses]


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[NewCluster]:
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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
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
