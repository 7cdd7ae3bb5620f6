"""Directories that users named for all files of a checkpoint, and what other tools read of the newest one."""

import json
import os

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import BadCheckpoint, ConfigError
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, images, publish


@pytest.fixture
def directory(fast_path):
    return CheckpointDirectory(fast_path / "dir")


def test_files_are_stored_in_the_directory_that_the_user_named(directory):
    publish(directory, SaveId(0, 7), f"{directory.path}/global_step7/")
    [stored] = directory.checkpoints()
    assert stored.path == directory.path / "global_step7" and stored.target is None
    assert stored.path_of("model.pt") == stored.path / "model.pt"
    assert stored.manifest.target == "global_step7/"
    publish(directory, SaveId(0, 8))
    assert assert_sound(directory) == [(0, 8), (0, 7)]
    directory.delete(SaveId(0, 7))
    assert not stored.path.exists()
    assert_clean(directory)


def test_one_directory_name_for_all_steps_is_overwritten(directory):
    for id in [SaveId(0, 5), SaveId(0, 6), SaveId(1, 6)]:
        publish(directory, id, f"{directory.path}/best/")
        assert assert_sound(directory) == [id]
    assert_clean(directory)


def test_one_step_under_two_directory_names_is_at_both(directory):
    for name in ("best/", "global_step5/", ""):
        publish(directory, SaveId(0, 5), name and f"{directory.path}/{name}")
    assert {stored.path.name for stored in directory.scan().places} == {"best", "global_step5", "checkpoint-5"}
    publish(directory, SaveId(0, 6))
    directory.delete(SaveId(0, 5))
    assert assert_sound(directory) == [(0, 6)]


def test_files_in_subdirectories_of_a_named_directory_are_stored(directory, fast_path):
    found = images(fast_path / "source", SaveId(0, 5))
    directory.publish(PublishRequest(SaveId(0, 5), found | {"optimizer_0/.metadata": found["rank_0.pt"]}))
    [stored] = directory.checkpoints()
    assert (stored.path / "optimizer_0/.metadata").read_bytes() == b"0.5 rank"
    directory.verify(stored)
    (stored.path / "optimizer_0/.metadata").write_bytes(b"0.5 RANK")
    with pytest.raises(BadCheckpoint, match=r"optimizer_0/\.metadata is damaged"):
        directory.verify(stored)


@pytest.mark.parametrize(
    "name", ["a/b/", "../other/", ".hidden/", "checkpoint-8/", "latest_checkpointed_iteration.txt/"]
)
def test_directory_names_that_would_not_be_found_are_refused(directory, name):
    with pytest.raises(ConfigError, match="the directory of step 7 must be in"):
        publish(directory, SaveId(0, 7), f"{directory.path}/{name}")
    publish(directory, SaveId(0, 7), f"{directory.path}/checkpoint-7/")
    assert [stored.manifest.target for stored in directory.checkpoints()] == [""]


def test_a_framework_finds_the_newest_checkpoint_by_its_own_file(directory, fast_path):
    found = images(fast_path / "source", SaveId(0, 5))
    for step in (5, 6):
        directory.publish(
            PublishRequest(
                SaveId(0, step), found, target=f"{directory.path}/step{step}/", details={"tracker": "latest"}
            )
        )
        assert (directory.path / "latest").read_text() == f"step{step}"
    directory.publish(PublishRequest(SaveId(0, 7), found))
    assert (directory.path / "latest").read_text() == "step6"
    for name in ("../latest", ".latest", "a/latest", "", 5):
        directory.publish(PublishRequest(SaveId(0, 8), found, details={"tracker": name}))
    assert {path.name for path in directory.path.parent.iterdir()} == {"source", "dir"}


def test_foreign_files_named_like_a_manifest_are_left_alone(directory):
    theirs = directory.path / "dataset"
    theirs.mkdir(parents=True)
    (theirs / "manifest.json").write_text(json.dumps({"files": []}))
    os.mkfifo(directory.path / "pipe")
    publish(directory, SaveId(0, 7), f"{directory.path}/best/")
    assert assert_sound(directory) == [(0, 7)]
    manifest = directory.path / "best/manifest.json"
    manifest.write_text(manifest.read_text().replace("model.pt", "mudel.pt"))
    assert [path.name for path, _ in directory.scan().damaged] == ["best"]
