"""The same script under plain torchrun, as users start it: killed workers start again and resume what is there."""

import pytest

from tests.faults.faults import kill
from tests.faults.jobs import (
    STORE_OF_ITS_OWN,
    TORCHRUN,
    Job,
    assert_all_injected,
    assert_as_if_nothing_had_happened,
    launcher_for,
)
from tests.support.ports import free_port

INTERVAL = 10
"""Steps between two saves to storage: what is in memory goes with the first rank, unless the next finds it."""


def run(job: Job, launcher: str, *options: str) -> None:
    if launcher == "standalone":
        job.run(launcher=(*TORCHRUN, *options), **STORE_OF_ITS_OWN)
    elif launcher == "address":  # a store that outlives the workers whatever is set
        place = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        job.run(launcher=(*TORCHRUN[:2], *place, *TORCHRUN[3:], *options))
    else:
        shape = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
        job.run(launcher=(*launcher_for(job.folder), *shape, *options))


@pytest.mark.parametrize(
    ("launcher", "kills", "options"),
    [
        ("standalone", [kill(1, at="train.step", step=25), kill(0, at="snapshot.skeleton", step=44)], ()),
        ("address", [kill(1, at="train.step", step=25)], ("--virtual-local-rank",)),
        ("fastckpt-run", [kill(1, at="train.step", step=25)], ("--virtual-local-rank",)),
    ],
    ids=["standalone", "address", "fastckpt-run"],
)
def test_killed_workers_resume_also_where_each_sees_its_own_device_alone(
    new_job, uninterrupted, launcher, kills, options
):
    job = new_job().with_faults(*kills)
    run(job, launcher, *options)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=INTERVAL)
    starts = len(job.resumes())
    assert starts == len(kills) + 1
    assert job.text().count("not started by fastckpt-run") == (starts if launcher != "fastckpt-run" else 0)
