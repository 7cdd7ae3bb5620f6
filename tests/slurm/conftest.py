"""A Slurm that ends with its test, and the losses of runs that nothing befell."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.conftest import uninterrupted
from tests.nodes.hosts import Cluster
from tests.nodes.hosts import obstacle as obstacle_of_hosts
from tests.slurm.workload_manager import Slurm, obstacle

__all__ = ["slurm", "uninterrupted"]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if why := obstacle_of_hosts() or obstacle():
        pytest.skip(why)
    cluster = Cluster(tmp_path / "cluster", 0, 1, 2)
    slurm = None
    try:
        slurm = Slurm(cluster)
        yield slurm
    finally:
        cluster.close()
        if slurm is not None:
            slurm.close()
