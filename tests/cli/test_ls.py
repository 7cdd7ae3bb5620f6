"""`fastckpt ls`: checkpoints of a directory on storage and in memory."""

import torch

from tests.cli.conftest import publish


def test_ls_names_checkpoints_of_other_tools_and_a_missing_directory(fastckpt, directory):
    said = fastckpt("ls", directory)
    assert said.code == 2 and str(directory) in said.err and not said.out
    directory.mkdir()
    assert fastckpt("ls", directory).out.splitlines()[1:] == ["no checkpoint of fastckpt is here"]
    torch.save({"w": torch.ones(2)}, directory / "last.pt")
    said = f"{directory}/last.pt seems to be of torch.save"
    for command in ("ls", "which"):
        assert fastckpt(command, directory).out.endswith(f"{said}: show, diff and export read it\n"), command
    assert f"{directory} has no checkpoint of fastckpt to check; {said}" in fastckpt("verify", directory).err


def test_a_checkpoint_without_the_files_of_a_rank_does_not_count(fastckpt, three):
    publish(three, 40, world_size=2)
    publish(three, 15, history=2)
    why = "not for all of 2 ranks: rank_1.pt missing"
    [newest, half, *others] = fastckpt("ls", three, "--json").document["checkpoints"]
    assert (half["step"], half["state"], half["whole"], half["why"]) == (40, "incomplete", False, why)
    assert [(item["history"], item["step"]) for item in (newest, *others)] == [(2, 15), (1, 30), (1, 20), (1, 10)]
    assert all(item["whole"] for item in (newest, *others))
    said = fastckpt("verify", three)
    assert said.code == 1 and why in said.out
    assert fastckpt("which", three, "--json").document["choice"]["step"] == 15
    fastckpt("prune", three, "--keep-last", 1, "--yes")
    assert {path.name for path in three.glob("checkpoint-*")} == {"checkpoint-15", "checkpoint-30", "checkpoint-40"}
