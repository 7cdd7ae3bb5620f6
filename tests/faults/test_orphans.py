"""Workers that outlive their agent and keep writing: killed before their memory is resumed."""

import signal
import time

import psutil

from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import slots_of
from fastckpt._core.memory.census import ArenaState, census
from fastckpt._core.memory.slots import images_in
from tests.faults.faults import outlive
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened

STEP = 18


def test_an_orphan_that_keeps_writing_is_killed_and_memory_is_resumed(new_job, uninterrupted):
    """Its agent is dead, and it goes on writing into the slot of a save."""
    job: Job = new_job().with_faults(outlive(rank=0, at="snapshot.fill", step=STEP))
    job.start("--wait-at", str(STEP - 1), restarts=0)
    job.wait_for_all(STEP - 1)
    job.until(lambda: job.persisted(10), "step 10 durable")  # or its slot would be kept, and a save skipped
    orphan = psutil.Process(job.pid(0))
    job.go_on(STEP - 1)
    job.until(lambda: job.injected() == 1, "one that does not come to an end")
    job.send(signal.SIGKILL)
    job.wait()
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
