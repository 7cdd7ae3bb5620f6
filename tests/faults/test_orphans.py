"""Workers that outlive their agent and keep writing: killed, or their memory is not resumed."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import slots_of
from fastckpt._core.memory.census import ArenaState, census
from fastckpt._core.memory.presence import signed
from fastckpt._core.memory.slots import images_in
from tests.faults.faults import kill, outlive
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened

STEP = 18


@pytest.fixture
def orphaned(new_job) -> Iterator[tuple[Job, psutil.Process]]:
    """A job of which the agent is dead, and a worker that goes on writing into the slot of a save."""
    job: Job = new_job().with_faults(outlive(rank=0, at="snapshot.fill", step=STEP))
    job.start("--wait-at", str(STEP - 1), restarts=0)
    job.wait_for_all(STEP - 1)
    job.until(lambda: job.persisted(10), "step 10 durable")  # or its slot would be kept, and a save skipped
    orphan = psutil.Process(job.pid(0))
    job.go_on(STEP - 1)
    job.until(lambda: job.injected() == 1, "one that does not come to an end")
    job.send(signal.SIGKILL)
    job.wait()
    yield job, orphan
    with contextlib.suppress(ProcessLookupError):
        os.kill(orphan.pid, signal.SIGKILL)


def test_an_orphan_that_keeps_writing_is_killed_and_memory_is_resumed(orphaned, uninterrupted):
    job, orphan = orphaned
    begun = [slot for slot in slots_of(job.arena()) if (begin := slots.read(slot).begin) and begin.id.step == STEP]
    before = [(slot / name).read_bytes() for slot in begun for name in images_in(slot)]
    time.sleep(0.2)
    assert before != [(slot / name).read_bytes() for slot in begun for name in images_in(slot)], "it writes on"
    (entry,) = census(job.arena().parent)
    assert entry.state is ArenaState.IN_USE and not entry.owner.is_alive()
    assert [process.pid for process in entry.writers] == [orphan.pid]
    saved = job.newest_saved()
    assert saved == STEP - 2
    job.run()
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert job.resumes(0) == job.resumes(1) == [(0, ""), (saved, "memory")]
    assert "which a dead job left writing to" in job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted())


def test_memory_of_an_orphan_that_cannot_be_found_is_neither_resumed_nor_written(orphaned, uninterrupted):
    """It writes all the while into memory that nobody else uses any more: a later save in memory is sound."""
    job, orphan = orphaned
    for path, _ in signed(job.arena()):
        path.unlink()
    job.with_faults(kill(rank=1, at="train.step", step=47)).run("--wait")
    assert orphan.status() != psutil.STATUS_ZOMBIE
    assert "writers of an earlier job still use" in job.text()
    first, (then, tier) = job.resumes()[1], job.resumes()[2]
    assert first == (10, "storage") and tier == "memory" and then >= 40
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=10)
