"""`fastckpt ls`: checkpoints of a directory on storage and in memory."""

import os
import time
from pathlib import Path

import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.cli import harm
from tests.cli.conftest import Fastckpt, publish


def test_ls_lists_checkpoints_in_memory_and_on_storage(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpoint(step, {"w": torch.ones(10)}, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint(60)
        checkpointer.save_checkpoint(3, {"w": torch.ones(10)}, storage_type=StorageType.MEMORY)
        harm.lengthen(directory / "checkpoint-1/model.pt")
        document = fastckpt("ls", directory, "--json").document
        shown = fastckpt("ls", directory)
    rows = [(item["step"], item["tier"], item["state"]) for item in document["checkpoints"]]
    assert rows == [
        (3, "memory", "whole"), (2, "memory", "whole"), (2, "storage", "whole"), (1, "memory", "whole"),
        (1, "storage", "damaged"),
    ]  # fmt: skip
    [job] = document["jobs"]
    assert (
        job["pid"] == os.getpid() and job["host"] and job["started"] and Path(job["arena"]).name.startswith("fastckpt-")
    )
    assert shown.code == 0 and not shown.err
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[0] == ["STEP", "HISTORY", "TIER", "SIZE", "AGE", "WORLD", "STATE", "PATH"]
    assert lines[1][:3] == ["3", "1", "memory"] and lines[1][6] == "s"  # SIZE and AGE have units
    assert f"damaged: {directory / 'checkpoint-1'}: " in shown.out and "in use by process" in shown.out


def test_ls_names_checkpoints_of_other_tools(fastckpt: Fastckpt, directory: Path):
    directory.mkdir(exist_ok=True)
    assert fastckpt("ls", directory).out.splitlines()[1:] == ["no checkpoint of fastckpt is here"]
    torch.save({"w": torch.ones(2)}, directory / "last.pt")
    said = f"{directory}/last.pt seems to be of torch.save"
    for command in ("ls", "which"):
        assert fastckpt(command, directory).out.endswith(f"{said}: show, diff and export read it\n"), command
    assert f"{directory} has no checkpoint of fastckpt to check; {said}" in fastckpt("verify", directory).err


def test_ls_json_has_every_key(fastckpt: Fastckpt, directory: Path):
    publish(directory, 7, history=3)
    document = fastckpt("ls", directory, "--json").document
    [item] = document["checkpoints"]
    assert 0 <= item.pop("age") < 60 and abs(item.pop("time") - time.time()) < 60
    place = directory / "checkpoint-7"
    assert item == {
        "step": 7, "history": 3, "tier": "storage", "state": "whole", "whole": True, "why": "", "world": 1,
        "size": sum((place / name).stat().st_size for name in ("model.pt", "rank_0.pt")), "path": str(place),
    }  # fmt: skip
    assert document["directory"] == str(directory) and document["jobs"] == []


def test_ls_gives_the_reason_why_a_checkpoint_does_not_count(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    target = tmp_path / "best.pt"
    publish(three, 40, target=str(target))
    harm.truncate(target)
    harm.remove(three / "checkpoint-30/manifest.json")
    harm.empty(three / "checkpoint-10/manifest.json")
    store = CheckpointDirectory(three)
    store.quarantine(next(stored for stored in store.checkpoints() if stored.id == SaveId(1, 20)), "bits flipped")
    items = {item["step"]: item for item in fastckpt("ls", three, "--json").document["checkpoints"]}
    assert {step: (item["state"], item["history"]) for step, item in items.items()} == {
        40: ("damaged", 1), 30: ("damaged", None), 20: ("quarantined", 1), 10: ("damaged", None),
    }  # fmt: skip
    assert items[40]["path"] == str(three / "checkpoint-40") and "bytes" in items[40]["why"]
    assert str(three / "checkpoint-30") in items[30]["why"] and "manifest" in items[30]["why"]
    assert items[20]["why"] == "bits flipped" and items[20]["size"] > 0
    assert not any(item["whole"] for item in items.values())


def test_ls_shows_histories_and_their_parents(fastckpt: Fastckpt, three: Path):
    publish(three, 15, history=2)
    items = fastckpt("ls", three, "--json").document["checkpoints"]
    assert [(item["history"], item["step"]) for item in items] == [(2, 15), (1, 30), (1, 20), (1, 10)]


def test_ls_of_a_missing_directory_names_it(fastckpt: Fastckpt, tmp_path: Path):
    said = fastckpt("ls", tmp_path / "none")
    assert said.code == 2 and "none" in said.err and not said.out


def test_ls_changes_no_file(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    plain = tmp_path / "plain"
    plain.mkdir()

    def names() -> list[tuple[str, float]]:
        return sorted((str(path), path.lstat().st_mtime) for top in (three, plain) for path in top.rglob("*"))

    before = names()
    for command in ("ls", "which", "show", "verify"):
        fastckpt(command, three)
        fastckpt(command, plain)
    assert names() == before


def test_a_checkpoint_without_the_files_of_a_rank_does_not_count(fastckpt: Fastckpt, three: Path):
    publish(three, 40, world_size=2)
    why = "not for all of 2 ranks: rank_1.pt missing"
    [newest, *others] = fastckpt("ls", three, "--json").document["checkpoints"]
    assert (newest["step"], newest["state"], newest["whole"], newest["why"]) == (40, "incomplete", False, why)
    assert [item["whole"] for item in others] == [True] * 3
    said = fastckpt("verify", three)
    assert said.code == 1 and why in said.out
    assert fastckpt("which", three, "--json").document["choice"]["step"] == 30
    fastckpt("prune", three, "--keep-last", 2, "--yes")
    assert {path.name for path in three.glob("checkpoint-*")} == {"checkpoint-20", "checkpoint-30", "checkpoint-40"}
