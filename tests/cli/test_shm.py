"""`fastckpt shm`: lists arenas, keeps those still needed, removes the others."""

import os
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer, StorageType
from tests.cli.conftest import killed_job


def test_shm_keeps_memory_of_a_job_that_runs(fastckpt, directory):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(1, {"w": torch.ones(2)}, storage_type=StorageType.MEMORY)
        [arena] = fastckpt("shm", "ls", "--json").document["arenas"]
        assert arena["state"] == "in use" and arena["newest"] == {"step": 1, "history": 1}
        assert arena["directory"] == str(directory) and arena["writers"] == [os.getpid()]
        [kept] = fastckpt("shm", "clean", "--force", "--yes", "--json").document["arenas"]
        assert not kept["removed"] and kept["why"] == "kept: in use" and Path(arena["path"]).exists()


def test_shm_removes_memory_of_a_dead_job_if_it_is_forced_to_and_names_an_unknown_arena(fastckpt, directory, tmp_path):
    killed_job(directory)
    [arena] = fastckpt("shm", "ls", "--json").document["arenas"]
    choice = fastckpt("which", directory, "--verify", "--json").document["choice"]
    assert (arena["state"], choice["step"], choice["tier"]) == ("left behind", 2, "memory")
    said = fastckpt("shm", "clean", "--yes", "--json")
    [kept] = said.document["arenas"]
    assert said.code == 0 and not kept["removed"] and "may be nowhere else" in kept["why"]
    [told] = fastckpt("shm", "clean", "--force", "--json").document["arenas"]
    assert told["why"] == "to be removed" and Path(arena["path"]).exists()
    said = fastckpt("shm", "clean", Path(arena["path"]).name, "--force", "--yes", "--json")
    assert said.code == 0 and said.document["arenas"][0]["removed"] and not Path(arena["path"]).exists()
    assert fastckpt("shm", "ls", "--json").document == {"arenas": []}
    choice = fastckpt("which", directory, "--json").document["choice"]
    assert (choice["step"], choice["tier"]) == (1, "storage")
    said = fastckpt("shm", "clean", "fastckpt-0-none", "--yes")
    assert said.code == 2 and "fastckpt-0-none" in said.err
    said = fastckpt("shm", "ls", env={"FASTCKPT_SHM_DIR": str(tmp_path / "none")})
    assert said.code == 2 and "FASTCKPT_SHM_DIR" in said.err
