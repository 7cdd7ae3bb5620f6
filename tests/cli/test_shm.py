"""`fastckpt shm` after an agent was killed: lists arenas, keeps those still needed, removes the others."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from tests.cli.conftest import Fastckpt
from tests.faults.jobs import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "job")
    yield made
    made.end()


def kill_agent(job: Job, fastckpt: Fastckpt) -> None:
    """The workers die with it, a moment later."""
    assert job.process is not None
    job.process.kill()
    job.process.wait(60)
    end = time.monotonic() + 60
    while fastckpt("shm", "ls", "--json").document["arenas"][0]["state"] != "left behind":
        assert time.monotonic() < end, "still in use"
        time.sleep(0.05)


def test_shm_lists_and_removes_memory_of_a_dead_agent(fastckpt: Fastckpt, job: Job):
    memory = ("--disk", "1000")  # so that no save is skipped while the disk is busy
    job.start(*memory, "--stop-at", "14").wait_for_all(14)
    [arena] = fastckpt("shm", "ls", "--json").document["arenas"]
    assert arena["state"] == "in use" and arena["newest"] == {"step": 14, "history": 1}
    assert arena["directory"] == str(job.checkpoint_dir) and sorted(arena["writers"]) == [job.pid(0), job.pid(1)]
    [kept] = fastckpt("shm", "clean", "--force", "--yes", "--json").document["arenas"]
    assert not kept["removed"] and kept["why"] == "kept: in use" and Path(arena["path"]).exists()

    kill_agent(job, fastckpt)
    choice = fastckpt("which", job.checkpoint_dir, "--verify", "--json").document["choice"]
    assert (choice["step"], choice["tier"], choice["world"]) == (14, "memory", 2)
    said = fastckpt("shm", "clean", "--yes", "--json")
    [kept] = said.document["arenas"]
    assert said.code == 0 and not kept["removed"] and "may be nowhere else" in kept["why"]
    [told] = fastckpt("shm", "clean", "--force", "--json").document["arenas"]
    assert told["why"] == "to be removed" and Path(arena["path"]).exists()

    job.start(*memory, "--stop-at", "16").wait_for_all(16)
    assert job.resumes()[-1] == (14, "memory")
    kill_agent(job, fastckpt)
    said = fastckpt("shm", "clean", Path(arena["path"]).name, "--force", "--yes", "--json")
    assert said.code == 0 and said.document["arenas"][0]["removed"] and not Path(arena["path"]).exists()
    assert fastckpt("shm", "ls", "--json").document == {"arenas": []}
    choice = fastckpt("which", job.checkpoint_dir, "--json").document["choice"]
    assert choice["tier"] == "storage" if job.stored() else choice is None  # the second agent may have flushed step 14


def test_shm_refuses_an_unknown_arena(fastckpt: Fastckpt):
    said = fastckpt("shm", "clean", "fastckpt-0-none", "--yes")
    assert said.code == 2 and "fastckpt-0-none" in said.err


def test_shm_prints_a_table_of_arenas(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(1, {"w": torch.ones(2)}, storage_type=StorageType.MEMORY)
        shown = fastckpt("shm", "ls").out.splitlines()
        assert shown[0].split() == ["STATE", "SIZE", "NEWEST", "OWNER", "DIRECTORY", "PATH"]
        assert f"{os.getpid()} on " in shown[1] and str(directory) in shown[1] and "step 1 of history 1" in shown[1]
        assert "kept: in use" in fastckpt("shm", "clean").out


def test_shm_without_a_tmpfs_names_the_missing_directory(
    fastckpt: Fastckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTCKPT_SHM_DIR", str(tmp_path / "none"))
    said = fastckpt("shm", "ls")
    assert said.code == 2 and "FASTCKPT_SHM_DIR" in said.err
