"""Clusters that end with their test, and the losses of runs that nothing befell."""

import fcntl
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nodes.hosts import Cluster, obstacle
from tests.nodes.job import PROGRAM
from tests.nodes.recovery import Losses, losses_of, read_log
from tests.ports import free_port

NewCluster = Callable[..., Cluster]
Uninterrupted = Callable[..., Losses]


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[NewCluster]:
    """Makes clusters of hosts with these numbers; skips the test where this machine permits none."""
    if why := obstacle():
        pytest.skip(why)
    made: list[Cluster] = []
    names = itertools.count()

    def make(*numbers: int, shares_storage: bool = True) -> Cluster:
        made.append(Cluster(tmp_path / f"cluster-{next(names)}", *numbers, shares_storage=shares_storage))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def _train(folder: Path, ranks: int, script: tuple[str, ...]) -> None:
    """A run without launcher, faults and saves."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    path = f"{PROGRAM.parents[2]}:{os.environ['PYTHONPATH']}"
    places = ("--out", str(folder), "--checkpoint-dir", str(folder))
    command = [sys.executable, str(PROGRAM), *places, "--saver", "none", "--pace", "0", *script]
    with (folder / "output").open("ab") as output:
        workers = [
            subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=os.environ | meeting | {"RANK": str(rank), "PYTHONPATH": path},
            )
            for rank in range(ranks)
        ]
    codes = [worker.wait(120) for worker in workers]
    assert codes == [0] * ranks, (folder / "output").read_text()


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
                for log in folder.glob("log.*"):
                    log.unlink()  # of an attempt that failed
                _train(folder, ranks, script)
                (folder / "whole").touch()
        return losses_of([line for log in folder.glob("log.*") for line in read_log(log)])

    return losses
