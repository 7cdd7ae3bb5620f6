"""A job whose checkpoints are in a store over the network, and one that has a copy of them there."""

import os
import signal
from pathlib import Path

from fastckpt._core.memory.arena import arena_path
from fastckpt._core.storage.store import open_store
from tests.faults.faults import kill
from tests.faults.jobs import assert_as_if_nothing_had_happened
from tests.support.live_folders import remove_live
from tests.unit._core.storage.s3 import Fault, s3, s3_server  # noqa: F401 (fixtures)

URL = "s3://bucket/run"


def newest_at_url() -> int:
    store = open_store(URL)
    try:
        return max((stored.id for stored in store.checkpoints()), default=(0, 0))[1]
    finally:
        store.close()


def end_node(job, location: str) -> None:
    """The agent dies, and the host with all its memory."""
    job.send(signal.SIGKILL)
    job.wait()
    remove_live(arena_path(os.environ["FASTCKPT_SHM_DIR"], location, 0))


def test_a_job_with_checkpoints_at_a_url_resumes_after_the_loss_of_its_node(new_job, uninterrupted, s3):  # noqa: F811
    """A worker is killed, and it goes on from memory; the node is, and it goes on from an S3 in trouble."""
    fault = s3.inject(Fault(500, every=7))
    job = new_job(checkpoint_dir=URL).with_faults(kill(rank=1, at="train.step", step=25))
    job.start("--stop-at", "37")
    job.wait_for_all(37)
    job.until(lambda: newest_at_url() >= 20, "what was flushed when the worker died, or newer, on S3")
    end_node(job, URL)
    newest = newest_at_url()
    job.run()
    assert job.injected() == 1 and fault.injected > 3
    s3.faults.clear()
    assert job.resumes(0) == job.resumes(1)
    assert [tier for _, tier in job.resumes()] == ["", "memory", "storage"]
    assert job.resumes()[-1] == (newest, "storage")
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=10)
    assert newest_at_url() == job.newest_saved()
    assert not list(Path(job.folder).glob("*-staging"))
