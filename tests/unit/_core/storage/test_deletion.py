"""Strategies of Flash Checkpoint over real directories; what deletion refuses."""

import shutil

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.retention import KeepEvery, KeepLast
from fastckpt._core.retention import (
    CheckpointDeletionStrategy,
    Deletion,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
)
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import ConfigError
from tests.unit._core.storage.checkpoints import assert_sound, ids, publish


@pytest.fixture
def directory(fast_path):
    return CheckpointDirectory(fast_path / "dir")


def steps(directory):
    return [step for _, step in ids(directory)]


@pytest.mark.parametrize("target", ["", "{dir}/checkpoint-{step}.pt"])
@pytest.mark.parametrize(
    ("strategy", "number", "kept"),
    [(KeepLatestStepStrategy, 2, [50, 40]), (KeepStepIntervalStrategy, 20, [50, 40, 20])],
)
def test_built_in_strategies_delete_old_checkpoints(directory, strategy, number, kept, target):
    for step in (10, 20, 30, 40, 50):
        publish(directory, SaveId(0, step), target.format(dir=directory.path, step=step))
    strategy = strategy(number, str(directory.path))
    strategy.clean_up(50, Deletion(directory))
    assert steps(directory) == kept
    strategy.clean_up(50, Deletion(directory))
    assert steps(directory) == kept
    assert_sound(directory)


def test_strategies_have_the_policies_that_the_agent_receives():
    assert KeepLatestStepStrategy(max_to_keep=3, checkpoint_dir="dir").policy == KeepLast(3)
    assert KeepStepIntervalStrategy(keep_interval=100, checkpoint_dir="dir").policy == KeepEvery(100)
    with pytest.raises(ConfigError, match="1 or more"):
        KeepLatestStepStrategy(0, "dir")


def test_a_strategy_works_with_a_delete_function_of_the_users(directory):
    for step in (1, 2):
        publish(directory, SaveId(0, step))
    KeepLatestStepStrategy(1, str(directory.path)).clean_up(2, shutil.rmtree)
    assert steps(directory) == [2]


def test_a_users_strategy_as_flash_checkpoint_has_them(directory):
    class KeepNone(CheckpointDeletionStrategy):
        def clean_up(self, step, delete_func):
            delete_func(str(directory.path / str(step)))

    publish(directory, SaveId(0, 1))
    publish(directory, SaveId(0, 2), str(directory.path / "two.pt"))
    publish(directory, SaveId(0, 3))
    for step in (1, 2):
        KeepNone().clean_up(step, Deletion(directory))
    assert steps(directory) == [3]
    assert not (directory.path / "two.pt").exists()


@pytest.mark.parametrize("path", ["checkpoint-1", "checkpoint-1/", "1", "./x/../checkpoint-1"])
def test_a_strategy_deletes_a_checkpoint_by_each_of_its_names(directory, path):
    publish(directory, SaveId(0, 1))
    publish(directory, SaveId(0, 2))
    Deletion(directory)(f"{directory.path}/{path}")
    assert steps(directory) == [2]


def test_a_strategy_deletes_a_checkpoint_by_the_path_of_its_file(directory, fast_path):
    publish(directory, SaveId(0, 1), str(directory.path / "one.pt"))
    publish(directory, SaveId(0, 2))
    (fast_path / "link").symlink_to(directory.path)
    Deletion(directory)(str(fast_path / "link/one.pt"))
    assert steps(directory) == [2]


@pytest.mark.parametrize("path", ["", "..", "../other", "/etc/passwd", "link"])
def test_deletion_of_paths_outside_the_directory_is_refused(directory, fast_path, path, monkeypatch):
    publish(directory, SaveId(0, 1))
    publish(directory, SaveId(0, 2))
    (fast_path / "other").mkdir()
    (directory.path / "link").symlink_to(fast_path / "other")
    with pytest.raises(ConfigError, match="only checkpoints inside"):
        Deletion(directory)(str(directory.path / path))
    assert steps(directory) == [2, 1] and (fast_path / "other").is_dir()


def test_the_newest_checkpoint_is_deleted_once_a_newer_one_is_complete(directory):
    publish(directory, SaveId(0, 9))
    publish(directory, SaveId(1, 5), str(directory.path / "five.pt"), parent=SaveId(0, 9))
    deletion = Deletion(directory)
    for path in ("5", "five.pt", "9"):
        deletion(str(directory.path / path))
        deletion.catch_up()
    assert ids(directory) == [(1, 5)]
    publish(directory, SaveId(1, 6), parent=SaveId(0, 9))
    deletion.catch_up()
    assert ids(directory) == [(1, 6)] and not (directory.path / "five.pt").exists()


def test_retention_keeps_the_newest_of_histories_not_resumed_from(directory, caplog):
    """A job that did not load: neither a strategy of ours nor a user's deletes what the one before left."""
    for step in (10, 20, 30):
        publish(directory, SaveId(0, step))
    for step in (1, 2, 3):
        publish(directory, SaveId(1, step))
    KeepLatestStepStrategy(2, str(directory.path)).clean_up(3, Deletion(directory))
    assert ids(directory) == [(1, 3), (1, 2), (0, 30), (0, 20)]
    for step in (20, 30):
        Deletion(directory)(str(directory.path / str(step)))
    assert ids(directory) == [(1, 3), (1, 2), (0, 30)]
    assert "30 was not deleted" in caplog.text and "--drop-history 0" in caplog.text


def test_deletion_of_unknown_paths_removes_nothing(directory, caplog):
    publish(directory, SaveId(0, 1))
    publish(directory, SaveId(0, 2))
    (directory.path / "runs").mkdir()
    for path in ("runs", "nothing", ".fastckpt", ".fastckpt/writers", "checkpoint-1/model.pt", "7"):
        caplog.clear()
        Deletion(directory)(str(directory.path / path))
        assert "not deleted" in caplog.text
    assert steps(directory) == [2, 1] and (directory.path / "runs").is_dir()
