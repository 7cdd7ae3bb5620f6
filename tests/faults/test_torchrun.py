"""The same script under plain torchrun, as users start it: killed workers start again and resume what is there."""

from tests.faults.faults import kill
from tests.faults.jobs import assert_all_injected, assert_as_if_nothing_had_happened
from tests.support.ports import free_port

INTERVAL = 10
"""Steps between two saves to storage: what is in memory goes with the first rank, unless the next finds it."""


def test_killed_workers_resume_also_where_each_sees_its_own_device_alone(new_job, uninterrupted):
    """At an address the store outlives the workers whatever is set."""
    job = new_job().with_faults(kill(0, at="snapshot.skeleton", step=24))
    launcher = ("-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    job.run(launcher=(*launcher, "--nproc-per-node", "2", "--max-restarts", "6", "--virtual-local-rank"))
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=INTERVAL)
    assert len(job.resumes()) == 2
    assert job.text().count("not started by fastckpt-run") == 2
