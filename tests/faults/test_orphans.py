"""Workers that outlive their agent and keep writing: killed, or their memory is not resumed."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import slots_of
from fastckpt._core.memory.census import ArenaState, census
from fastckpt._core.memory.presence import signed
from fastckpt._core.memory.slots import images_in
from tests.faults.faults import kill
from tests.faults.jobs import HERE, Job, assert_as_if_nothing_had_happened
from tests.faults.orphan import STEP


@pytest.fixture
def orphaned(new_job) -> Iterator[Job]:
    """A job of which the agent is dead, and both workers go on writing into the slot of a save."""
    job: Job = new_job()
    shape = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "0")
    launcher = (str(HERE / "launch.py"), str(job.folder), *shape, str(HERE / "orphan.py"))
    job.start("--wait-at", str(STEP - 1), launcher=launcher)
    job.wait_for_all(STEP - 1)
    job.until(lambda: job.persisted(10), "step 10 durable")  # or its slot would be kept, and a save skipped
    job.go_on(STEP - 1)
    job.until(lambda: len(list(job.folder.glob("orphan.*"))) == 2, "two that do not come to an end")
    job.process.kill()
    job.wait()
    yield job
    for path in job.folder.glob("orphan.*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.suffix[1:]), signal.SIGKILL)


def orphans(job: Job) -> list[psutil.Process]:
    found = []
    for path in job.folder.glob("orphan.*"):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(path.suffix[1:])))
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def images(arena: Path) -> dict[Path, bytes]:
    """What is in the slot that is being written to."""
    filling = [slot for slot in slots_of(arena) if (begun := slots.read(slot).begin) and begun.id.step == STEP]
    return {slot / name: (slot / name).read_bytes() for slot in filling for name in images_in(slot)}


def test_orphans_that_keep_writing_are_killed_and_memory_is_resumed(orphaned: Job, uninterrupted):
    arena = orphaned.arena()
    before = images(arena)
    assert before and len(orphans(orphaned)) == 2
    time.sleep(0.2)
    assert images(arena) != before, "they write on"
    (entry,) = census(arena.parent)
    assert entry.state is ArenaState.IN_USE and not entry.owner.is_alive()
    assert {process.pid for process in entry.writers} == {process.pid for process in orphans(orphaned)}
    saved = orphaned.newest_saved()
    assert saved == STEP - 2
    orphaned.run()
    assert orphans(orphaned) == []
    assert orphaned.resumes(0) == orphaned.resumes(1) == [(0, ""), (saved, "memory")]
    assert "which a dead job left writing to" in orphaned.text()
    assert_as_if_nothing_had_happened(orphaned, uninterrupted())


def test_memory_of_orphans_that_cannot_be_found_is_neither_resumed_nor_written(orphaned: Job, uninterrupted):
    """They write all the while into memory that nobody else uses any more: a later save in memory is sound."""
    for path, _ in signed(orphaned.arena()):
        path.unlink()
    orphaned.with_faults(kill(rank=1, at="train.step", step=47)).run("--wait")
    assert len(orphans(orphaned)) == 2
    assert "writers of an earlier job still use" in orphaned.text()
    first, (then, tier) = orphaned.resumes()[1], orphaned.resumes()[2]
    assert first == (10, "storage") and tier == "memory" and then >= 40
    assert_as_if_nothing_had_happened(orphaned, uninterrupted(), interval=10)
