"""Hosts that come to a running job and do not fit it: each is told why, and the others train on."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nodes.conftest import NewCluster
from tests.nodes.hosts import ROOT, Cluster, name_of
from tests.nodes.job import DEADLINE, NodesJob, endpoint
from tests.nodes.test_lost_hosts import EVERY, SOON, campaign
from tests.nodes.test_spares import started

OLDER, NEWER = "0.0.1", "99.0.0"
LONG = ("--steps", "100000")
LAST_CALL = ("--rdzv-conf", "last_call_timeout=3")


def output(job: NodesJob, number: int) -> str:
    path = job.out / f"output.{name_of(number)}"
    return path.read_text(errors="replace") if path.exists() else ""


def starts(job: NodesJob) -> dict[int, int]:
    return {number: sum(line["what"] == "started" for line in job.lines(number)) for number in job.agents}


@pytest.fixture(scope="module")
def of_version(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """An environment in which this project has another version."""

    def environment(version: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("version")
        for package in ("fastckpt", "fastckpt_run"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        file = folder / "fastckpt/_core/version.py"
        file.write_text(re.sub(r'VERSION = ".*"', f'VERSION = "{version}"', file.read_text()))
        return {"PYTHONPATH": str(folder)}

    return environment


@pytest.fixture
def of_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch says to be of another release."""
    folder = tmp_path / "torch-of-another-release"
    folder.mkdir()
    # Of torch itself there is one in this environment.
    (folder / "sitecustomize.py").write_text("import torch.version\ntorch.__version__ = '2.10.0'\n")
    return {"PYTHONPATH": str(folder)}


def unshared(cluster: Cluster, number: int) -> None:
    """Have a host see an empty directory where the others have their checkpoints."""
    place = cluster.folder / "elsewhere"
    place.mkdir(exist_ok=True)
    cluster.hosts[number].run("mount", "--bind", str(place), str(cluster.storage))


def shared(cluster: Cluster, number: int) -> None:
    """Undo `unshared`."""
    cluster.hosts[number].run("umount", str(cluster.storage))


def agent_of(job: NodesJob, number: int) -> int:
    """The pid of a host's agent."""
    entered = job.agents[number].pid
    return int(Path(f"/proc/{entered}/task/{entered}/children").read_text())


def refused(job: NodesJob, number: int, *flags: str, **environment: str) -> str:
    """Why a host is refused that has this command line; the others train on, and none of their workers was started."""
    before, length = starts(job), len(output(job, number))
    job.launch(number, flags=flags, **environment)
    assert job.agents.pop(number).wait(DEADLINE) == 2, job.text()
    job.do_steps(10, SOON)
    assert starts(job) == before, job.text()
    text = output(job, number)[length:]
    assert "Traceback" not in text
    return text[text.index("fastckpt-run: error: ") :]


def running(new_cluster: NewCluster) -> NodesJob:
    """A job on two of three hosts, so long that what it knows of its directory was announced."""
    job = NodesJob(
        new_cluster(0, 1, 2), "--memory", str(EVERY), *LONG, nodes="1:3", meeting=endpoint(0, 1), flags=LAST_CALL
    )
    job.launch(0, 1)
    job.do_steps(100)
    return job


def assert_joins(job: NodesJob, number: int) -> None:
    assert "error:" not in output(job, 0) + output(job, 1)
    recovery = job.recovered(job.launch(number))
    assert recovery.ranks == {0: 0, 1: 1, number: 2}
    job.do_steps(5)
    job.end()


def test_hosts_with_another_directory_are_refused_by_name_and_one_that_fits_joins(new_cluster: NewCluster) -> None:
    job = running(new_cluster)
    cluster, script = job.cluster, job._script
    unshared(cluster, 2)
    assert f"error: {cluster.storage} is not the checkpoint directory of the job on this node" in refused(job, 2)
    shared(cluster, 2)
    another = cluster.folder / "another"
    job._script = [str(another) if each == str(cluster.storage) else each for each in script]
    assert f"--checkpoint-dir is {another} on this node, and the job" in refused(job, 2)
    assert not another.exists()
    job._script = script
    assert_joins(job, 2)


@campaign
def test_hosts_with_another_version_setting_or_script_are_refused_by_name_and_one_that_fits_joins(
    new_cluster: NewCluster, of_version: Callable[[str], dict[str, str]], of_torch: dict[str, str]
) -> None:
    job = running(new_cluster)
    assert f"runs fastckpt {OLDER}, and the nodes of the job" in refused(job, 2, **of_version(OLDER))
    assert "this node runs torch 2.10.0, and the nodes of the job" in refused(job, 2, **of_torch)
    assert "--fast-replicas is xor:3 on this node, and auto on" in refused(job, 2, "--fast-replicas", "xor:3")
    assert "--nnodes is 1:4 on this node, and 1:3 on the nodes" in refused(job, 2, "--nnodes", "1:4")
    script = job._script
    job._script = [str(Path(script[0]).with_name("reference.py")), *script[1:]]
    assert "the script is reference.py on this node, and train.py on the nodes of the job" in refused(job, 2)
    job._script = script
    assert_joins(job, 2)


def test_a_spare_that_does_not_fit_is_refused_before_it_is_needed(new_cluster: NewCluster) -> None:
    job, waiting = started(new_cluster, 2, 1, script=LONG)
    job.cluster.add(3)
    unshared(job.cluster, 3)
    job.do_steps(100)
    text = refused(job, 3)
    assert f"{job.cluster.storage} is not the checkpoint directory of the job on this node" in text
    assert "--fast-replicas is 0 on this node" in refused(job, 3, "--fast-replicas", "0")
    lost = job.lose(1)
    job.agents[2] = waiting[2]
    recovery = job.recovered(lost, SOON)
    assert recovery.ranks == {0: 0, 2: 1}
    job.do_steps(5)
    job.end()


@campaign
def test_a_job_goes_over_to_a_newer_version_host_by_host(
    new_cluster: NewCluster, of_version: Callable[[str], dict[str, str]]
) -> None:
    cluster = new_cluster(0, 1, 2)
    job = NodesJob(cluster, "--memory", str(EVERY), *LONG, nodes="1:3", meeting=endpoint(0, 1, 2), flags=LAST_CALL)
    newer = of_version(NEWER)
    job.launch(0, 1, 2)
    job.do_steps(20)
    waiting = {}
    for number in (2, 1):
        os.kill(agent_of(job, number), signal.SIGTERM)
        assert job.agents.pop(number).wait(DEADLINE) == 1
        job.do_steps(10)
        before = starts(job)
        job.launch(number, **newer)
        waiting[number] = job.agents.pop(number)
        said = f"this node runs fastckpt {NEWER}, and the nodes of the job"
        job.until(lambda number=number, said=said: said in output(job, number), "it waits")  # type: ignore[misc]
        job.do_steps(20)
        assert starts(job) == before
    os.kill(agent_of(job, 0), signal.SIGTERM)
    assert job.agents.pop(0).wait(DEADLINE) == 1
    job.agents |= waiting
    job.launch(0, **newer)
    reached = job.reached()
    job.until(lambda: all(line["world"] == 3 for n in (0, 1, 2) for line in job.lines(n)[-1:]), "all train")
    job.do_steps(10)
    assert job.reached() > reached
    assert all(output(job, number).count("it waits until none of these is left") == 1 for number in (1, 2))
    job.end()
