"""Containers as those run them who are careful: no root, no rights, nothing to write to, little memory."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.conftest import ContainerJob
from tests.containers.containers import TEMPORARY, Pod, python
from tests.faults.faults import hang, to_text
from tests.faults.jobs import assert_as_if_nothing_had_happened
from tests.nodes.conftest import NewCluster

pytestmark = pytest.mark.campaign
USER = 1000
POWERLESS = (
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
    *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
)
AS_KUBELET_MAKES_IT = f"size=512m,mode=2777,gid={USER}"
"""Options of the tmpfs of an emptyDir with an fsGroup."""


@pytest.fixture
def users_folder() -> Iterator[Path]:
    """A place that is another user's."""
    folder = Path(os.environ["TMPDIR"]) / "job"
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def users_job(users_folder: Path, new_cluster: NewCluster) -> ContainerJob:
    job = ContainerJob(users_folder)
    job.pod = Pod(new_cluster(0), memory=AS_KUBELET_MAKES_IT)
    os.chown(users_folder, USER, USER)
    return job


def test_a_user_without_rights_on_a_read_only_root_resumes_from_memory_and_is_told_where_a_rank_hangs(
    users_job: ContainerJob, uninterrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, reference = users_job, uninterrupted()
    monkeypatch.setenv("HOME", TEMPORARY)
    restrictions = {"privileges": POWERLESS, "volume": job.folder}
    first = job.begin("--stop-at", "8", "--disk", "1000", **restrictions)
    job.wait_for_all(8)
    status = dict(line.split(":\t") for line in Path(f"/proc/{first.pid}/status").read_text().splitlines())
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1"
    assert status["Uid"].split() == 4 * [str(USER)]
    first.kill()
    # Without CAP_SYS_PTRACE: stacks are written by the process itself.
    (job.folder / "faults").write_text(to_text([hang(1, "train.step", 12, "take_a_lock_that_another_thread_holds")]))
    job.begin(launcher=python("-m", "fastckpt_run", "--fast-hang-timeout", "3"), **restrictions)
    assert job.wait() == 0, job.text()
    assert job.tiers() == [(8, "memory"), (10, "memory")]
    assert "take_a_lock_that_another_thread_holds" in job.text()
    assert_as_if_nothing_had_happened(job, reference)
