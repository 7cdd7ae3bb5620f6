"""The same script under plain torchrun, as users start it: killed workers start again and resume what is there."""

import pytest

from tests.faults.faults import kill
from tests.faults.jobs import TORCHRUN, assert_all_injected, assert_as_if_nothing_had_happened, launcher_for
from tests.support.ports import free_port

INTERVAL = 10
"""Steps between two saves to storage: what is in memory goes with the first rank, unless the next finds it."""
OF_EACH_ROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Has torchrun give each round of workers a store of its own."""
SHAPE = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")


@pytest.mark.parametrize(
    ("launcher", "store"),
    [("address", {}), ("fastckpt-run", {}), pytest.param("standalone", OF_EACH_ROUND, marks=pytest.mark.campaign)],
    ids=["address", "fastckpt-run", "standalone"],
)
def test_killed_workers_resume_also_where_each_sees_its_own_device_alone(new_job, uninterrupted, launcher, store):
    """At an address the store outlives the workers whatever is set."""
    job = new_job().with_faults(kill(0, at="snapshot.skeleton", step=24))
    place = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    command = {
        "address": (*TORCHRUN[:2], *place, *TORCHRUN[3:]),
        "standalone": TORCHRUN,
        "fastckpt-run": (*launcher_for(job.folder), *SHAPE),
    }[launcher]
    job.run(launcher=(*command, "--virtual-local-rank"), **store)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=INTERVAL)
    assert len(job.resumes()) == 2
    assert job.text().count("not started by fastckpt-run") == (2 if launcher != "fastckpt-run" else 0)
