"""Hosts that come to a running job and do not fit it: each is told why, and the others train on.

Hosts that have old addresses of others, in /etc/hosts or DNS, come to it all the same.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import HOSTS, ROOT, Cluster, address_of, name_of
from tests.nodes.job import DEADLINE, EVERY, LAST_CALL, SOON, NodesJob

OLDER, NEWER = "0.0.1", "99.0.0"
LONG = ("--steps", "100000")
campaign = pytest.mark.campaign


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


def starts(job: NodesJob) -> dict[int, int]:
    return {number: job.starts(number) for number in job.agents}


def refused(job: NodesJob, number: int, *flags: str, **environment: str) -> str:
    """Why a host is refused that has this command line; the others train on, and none of their workers was started."""
    before, length = starts(job), len(job.output(number))
    job.launch(number, flags=flags, **environment)
    assert job.agents.pop(number).wait(DEADLINE) == 2, job.text()
    job.do_steps(10, SOON)
    assert starts(job) == before, job.text()
    text = job.output(number)[length:]
    assert "Traceback" not in text
    return text[text.index("fastckpt-run: error: ") :]


def running(fleet: Fleet) -> NodesJob:
    """A job on two of three hosts, so long that what it knows of its directory was announced."""
    job = fleet.job((0, 1, 2), *LONG, nodes="1:3", stores=(0, 1), flags=LAST_CALL)
    job.launch(0, 1)
    job.do_steps(100)
    return job


def assert_joins(job: NodesJob, number: int) -> None:
    assert "error:" not in job.output(0) + job.output(1)
    recovery = job.recovered(job.launch(number))
    assert recovery.ranks == {0: 0, 1: 1, number: 2}
    job.finish()


def test_hosts_with_another_directory_are_refused_by_name_and_one_that_fits_joins(fleet: Fleet) -> None:
    job = running(fleet)
    cluster, script = job.cluster, job._script
    unshared(cluster, 2)
    assert f"error: {cluster.storage} is not the checkpoint directory of the job on this node" in refused(job, 2)
    cluster.hosts[2].run("umount", str(cluster.storage))
    another = cluster.folder / "another"
    job._script = [str(another) if each == str(cluster.storage) else each for each in script]
    assert f"--checkpoint-dir is {another} on this node, and the job" in refused(job, 2)
    assert not another.exists()
    job._script = script
    assert "--fast-replicas is xor:3 on this node, and auto on" in refused(job, 2, "--fast-replicas", "xor:3")
    assert_joins(job, 2)


@campaign
def test_hosts_with_another_version_setting_or_script_are_refused_by_name_and_one_that_fits_joins(
    fleet: Fleet, of_version: Callable[[str], dict[str, str]], of_torch: dict[str, str]
) -> None:
    job = running(fleet)
    assert f"runs fastckpt {OLDER}, and the nodes of the job" in refused(job, 2, **of_version(OLDER))
    assert "this node runs torch 2.10.0, and the nodes of the job" in refused(job, 2, **of_torch)
    assert "--nnodes is 1:4 on this node, and 1:3 on the nodes" in refused(job, 2, "--nnodes", "1:4")
    script = job._script
    job._script = [str(Path(script[0]).with_name("reference.py")), *script[1:]]
    assert "the script is reference.py on this node, and train.py on the nodes of the job" in refused(job, 2)
    job._script = script
    assert_joins(job, 2)


@campaign
def test_a_spare_that_does_not_fit_is_refused_before_it_is_needed(fleet: Fleet) -> None:
    job = fleet.with_spares(2, 1, *LONG)
    job.cluster.add(3)
    unshared(job.cluster, 3)
    job.do_steps(100)
    assert f"{job.cluster.storage} is not the checkpoint directory of the job on this node" in refused(job, 3)
    assert "--fast-replicas is 0 on this node" in refused(job, 3, "--fast-replicas", "0")
    lost = job.lose(1)
    job.count_on(2)
    assert job.recovered(lost, SOON).ranks == {0: 0, 2: 1}
    job.finish()


def told_to_leave(job: NodesJob, number: int) -> None:
    os.kill(job.agent_pid(number), signal.SIGTERM)
    assert job.agents.pop(number).wait(DEADLINE) == 1


@campaign
def test_a_job_goes_over_to_a_newer_version_host_by_host(
    fleet: Fleet, of_version: Callable[[str], dict[str, str]]
) -> None:
    hosts, newer = (0, 1, 2), of_version(NEWER)
    job = fleet.started(hosts, *LONG, nodes="1:3", stores=hosts, flags=LAST_CALL, steps=20)

    def waits(number: int) -> bool:
        return f"this node runs fastckpt {NEWER}, and the nodes of the job" in job.output(number)

    for number in (2, 1):
        told_to_leave(job, number)
        job.do_steps(10)
        before = starts(job)
        job.launch(number, **newer)
        job.set_aside(number)
        job.until(partial(waits, number), "it waits")
        job.do_steps(20)
        assert starts(job) == before
    told_to_leave(job, 0)
    job.count_on(1, 2)
    job.launch(0, **newer)
    reached = job.reached()
    job.until(lambda: all(line["world"] == 3 for number in hosts for line in job.lines(number)[-1:]), "all train")
    job.do_steps(10)
    assert job.reached() > reached
    assert all(job.output(number).count("it waits until none of these is left") == 1 for number in (1, 2))
    job.end()


# --- old addresses


def forget(cluster: Cluster, number: int, names: Collection[int]) -> None:
    """Have a host know addresses of others that nobody has any more."""
    old = {each: HOSTS - 1 - each for each in names}
    known = "".join(f"{address_of(old.get(each, each))} {name_of(each)}\n" for each in range(HOSTS))
    (cluster.folder / name_of(number) / "hosts").write_text(f"127.0.0.1 localhost\n{known}")


def joined(fleet: Fleet, *stores: int, stale: Collection[int]) -> NodesJob:
    """A job of two hosts, to which host 2 has come in seconds, though it has old addresses of some."""
    job = fleet.job((0, 1, 2), *LONG, nodes="2:3", stores=stores, flags=LAST_CALL)
    job.launch(0, 1)
    job.do_steps(16)
    forget(job.cluster, 2, stale)
    recovery = job.recovered(job.launch(2), 2 * SOON)
    assert recovery.ranks == {0: 0, 1: 1, 2: 2} and recovery.starts == {0: 1, 1: 1, 2: 1}
    job.do_steps(5)
    return job


def test_a_host_that_may_hold_the_store_and_has_old_addresses_of_all_others_joins(fleet: Fleet) -> None:
    job = joined(fleet, 0, 1, 2, stale=(0, 1))
    said = f"by node0, node1: the others meet on host node0, at {address_of(0)}:29400, as that one has noted in"
    assert job.output(2).count(said) == 1, job.output(2)
    assert all("reaches nobody of its job" not in job.output(number) for number in (0, 1))
    job.end()


@campaign
def test_a_host_with_old_addresses_of_all_others_goes_on_with_them_when_the_store_is_lost(fleet: Fleet) -> None:
    job = joined(fleet, 0, 1, 2, stale=(0, 1))
    recovery = job.recovered(job.lose(0), SOON)
    assert recovery.ranks == {1: 1, 2: 0} and recovery.lost <= EVERY
    job.do_steps(5)
    recovery = job.recovered(job.add(0), SOON)
    assert sorted(recovery.ranks.values()) == [0, 1, 2]
    job.end()


@campaign
def test_a_host_with_an_old_address_of_the_one_with_the_first_rank_joins(fleet: Fleet) -> None:
    job = joined(fleet, 1, stale=(0,))
    assert "reaches nobody of its job" not in job.output(2)
    job.end()
