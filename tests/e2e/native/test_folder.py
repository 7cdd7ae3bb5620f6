"""Checkpoints that a framework lays out: saved files and names, and the directory to load from."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastckpt._core.format.ids import SaveId
from fastckpt._core.native.folder_checkpointer import (
    CheckpointNames,
    FolderCheckpointer,
    Raw,
    RequiredFiles,
    StorageType,
    Tensors,
)
from fastckpt._core.retention import KeepLatestStepStrategy
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import BadCheckpoint, ConfigError, NoLoadableCheckpoint

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY
NEEDS = RequiredFiles("state.json", "optimizer/rank_0.pt")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def files(step: int) -> dict[str, Any]:
    return {
        "model.safetensors": Tensors({"w": torch.full((1000,), float(step))}, {"format": "pt"}),
        "optimizer/rank_0.pt": {"step": step, "moments": torch.full((50,), step)},
        "state.json": Raw(json.dumps({"log": [*range(step)]}).encode(), may_end_with_spaces=True),
        "tokenizer.model": Raw(b"\0" * step + b"!"),
    }


def check(path: Path, step: int) -> None:
    """What torch, safetensors and json read there is what was saved in a step."""
    assert torch.equal(load_file(path / "model.safetensors")["w"], torch.full((1000,), float(step)))
    loaded = torch.load(path / "optimizer/rank_0.pt")
    assert loaded["step"] == step and torch.equal(loaded["moments"], torch.full((50,), step))
    assert json.loads((path / "state.json").read_text()) == {"log": [*range(step)]}
    assert (path / "tokenizer.model").read_bytes() == b"\0" * step + b"!"


def test_memory_and_storage_have_the_files_of_each_save_whose_names_and_sizes_change(directory):
    """Names come and go, files grow and shrink: the slots, and storage, have what the last save had."""
    expected = {}
    with FolderCheckpointer(directory, NEEDS) as one:
        found = one.find()
        assert found is None
        for step in range(1, 12):
            some = {f"new_{step}.bin": Raw(os.urandom(step * 5000))} if step % 4 == 0 else {}
            some |= {"some.bin": Raw(bytes([step]) * 70_000)} if step % 2 else {}
            assert one.save_checkpoint(step, files(step) | some, DISK if 6 < step < 10 else MEMORY)
            one.wait_latest_checkpoint()
            assert found is None or not found.path.exists(), "a save lets go of it"
            found, expected[step] = one.find(), files(step).keys() | some.keys()
            assert (found.step, found.tier, found.path.name) == (step, "memory", f"checkpoint-{step}")
            check(found.path, step)
            assert {str(path.relative_to(found.path)) for path in found.path.rglob("*.*")} == expected[step]
            assert all((found.path / name).read_bytes() == raw.data for name, raw in some.items())
        with found:
            pass
        assert not found.path.exists()
    for stored in CheckpointDirectory(directory).checkpoints():
        assert {entry.name for entry in stored.manifest.files} == expected[stored.id.step]
        stored.verify()
        check(stored.path, stored.id.step)
    with FolderCheckpointer(directory, NEEDS) as one, one.find() as found:
        assert (found.step, found.tier) == (11, "storage")


def test_file_names_with_step_numbers_take_no_more_memory(directory):
    with FolderCheckpointer(directory, NEEDS) as one:
        for step in range(1, 13):
            numbered = {f"global_step{step}/rank_0.pt": {"w": torch.full((1 << 18,), float(step))}}
            assert one.save_checkpoint(step, files(1) | numbered, storage_type=MEMORY), step
        arena = one._writer.link.arena
        held = [path.name for path in arena.glob("slot-*/global_step*")]
        assert sorted(held) == ["global_step10", "global_step11", "global_step12"]
        assert len(list(arena.glob("slot-*/global_step*/rank_0.pt"))) == 3
        with one.find() as found:
            assert torch.load(found.path / "global_step12/rank_0.pt")["w"][0] == 12


NEVER = ["/tmp/x", "a/../../x", "", "a/.hidden", "a//b", "x" * 201, "a\nb", "manifest.json", "state.json/x"]


def test_names_that_no_file_can_have_are_refused_at_once(directory):
    """They are refused at once: nothing is saved elsewhere, and no save goes on that would never count."""
    with FolderCheckpointer(directory, NEEDS) as one:
        one.save_checkpoint(1, files(1), storage_type=MEMORY)
        for name in NEVER:
            with pytest.raises(ConfigError, match="cannot have a file called"):
                one.save_checkpoint(2, files(2) | {name: Raw(b"x")}, storage_type=MEMORY)
        odd = dict.fromkeys(("with spaces.txt", "Größe/重み.bin", "x" * 200), Raw(b"x"))
        assert one.save_checkpoint(3, files(3) | odd, DISK)
        one.wait_latest_checkpoint()
        with one.find() as found:
            for place in (directory / "checkpoint-3", found.path):
                assert [(place / name).read_bytes() for name in odd] == [b"x"] * 3


def test_directories_that_users_changed_are_left_alone(directory):
    with FolderCheckpointer(directory, NEEDS) as one:
        for step in (3, 4):
            one.save_checkpoint(step, files(step), DISK, named=CheckpointNames(f"step{step}"))
            one.wait_latest_checkpoint()
    shutil.copytree(directory / "step4", directory / "copy")
    (directory / "link").symlink_to("step3")
    (directory / "step3").rename(directory / "renamed")
    (directory / "newest").symlink_to("step4")
    with FolderCheckpointer(directory, NEEDS) as one:
        for name, step in (("", 4), ("copy", 4), ("renamed", 3), ("newest", 4)):
            with one.find(directory / name if name else "") as found:
                assert found.step == step
                check(found.path, step)
        one.save_checkpoint(5, files(5), DISK, named=CheckpointNames("newest"))
        assert one.wait_latest_checkpoint() == 5
    check(directory / "newest", 5)
    assert (directory / "link").is_symlink() and not (directory / "newest").is_symlink()
    check(directory / "copy", 4)
    check(directory / "step4", 4)
    assert not list((directory / ".fastckpt").glob("quarantine*"))


@pytest.mark.parametrize("called", ["../../elsewhere", 5])
def test_a_manifest_that_names_an_outside_folder_reaches_no_other_path(directory, tmp_path, called):
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "rank").write_bytes(b"1")
    images = {"state.json": tmp_path / "state.json", "optimizer/rank_0.pt": tmp_path / "rank"}
    CheckpointDirectory(directory).publish(PublishRequest(SaveId(0, 7), images, details={"folder": called}))
    with FolderCheckpointer(directory, NEEDS) as one, one.find() as found:
        assert found.path.name == "checkpoint-7" and found.path.is_relative_to(one._writer.link.arena)


def test_a_history_reopened_by_the_same_job_stays_in_its_line_of_training(directory):
    """As Trainer does for a step that was measured since it was saved."""
    with FolderCheckpointer(directory, NEEDS, KeepLatestStepStrategy(1, str(directory))) as one:
        for step in (1, 2, 3):
            assert one.save_checkpoint(step, files(step), DISK)
            one.wait_latest_checkpoint()
            one.session.begin_history()
    assert [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()] == [3]


def test_checkpoints_of_the_stock_framework_are_loaded_in_place_and_of_another_kind_refused(directory, tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "optimizer").mkdir(parents=True)
    (theirs / "state.json").write_text("{}")
    with FolderCheckpointer(directory, NEEDS) as one:
        with one.find(theirs) as found:
            assert found.path == theirs and found.step == -1
        with pytest.raises(BadCheckpoint, match="cannot be loaded"):
            one.find(tmp_path / "nothing")
        one.save_checkpoint(1, files(1), DISK)
    other = FolderCheckpointer(directory, RequiredFiles("other.json", "other.json"))
    with other, pytest.raises(NoLoadableCheckpoint, match="is of another kind of checkpointer"):
        other.find()
