"""Strategies of Flash Checkpoint over real directories; what deletion refuses."""

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.retention import (
    Deletion,
    KeepLatestStepStrategy,
)
from fastckpt.errors import ConfigError
from tests.unit._core.storage.checkpoints import ids, publish


def steps(directory):
    return [step for _, step in ids(directory)]


def test_a_strategy_deletes_a_checkpoint_by_each_of_its_names_and_nothing_else(directory, fast_path, caplog):
    (fast_path / "link").symlink_to(directory.path)
    for step in range(1, 7):
        publish(directory, SaveId(0, step), str(directory.path / "five.pt") if step == 5 else "")
    names = ["dir/checkpoint-1", "dir/checkpoint-2/", "dir/3", "dir/./x/../checkpoint-4", "link/five.pt"]
    for count, path in enumerate(names, 1):
        Deletion(directory)(f"{fast_path}/{path}")
        assert steps(directory) == [*range(6, count, -1)]
    publish(directory, SaveId(0, 7))
    (directory.path / "runs").mkdir()
    for path in ("runs", "nothing", ".fastckpt", ".fastckpt/writers", "checkpoint-6/model.pt", "8"):
        caplog.clear()
        Deletion(directory)(str(directory.path / path))
        assert "not deleted" in caplog.text
    (fast_path / "other").mkdir()
    (directory.path / "link").symlink_to(fast_path / "other")
    for path in ("", "..", "../other", "/etc/passwd", "link"):
        with pytest.raises(ConfigError, match="only checkpoints inside"):
            Deletion(directory)(str(directory.path / path))
    assert steps(directory) == [7, 6] and (directory.path / "runs").is_dir() and (fast_path / "other").is_dir()


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
    for id in [*(SaveId(0, step) for step in (10, 20, 30)), *(SaveId(1, step) for step in (1, 2, 3))]:
        publish(directory, id)
    KeepLatestStepStrategy(2, str(directory.path)).clean_up(3, Deletion(directory))
    assert ids(directory) == [(1, 3), (1, 2), (0, 30), (0, 20)]
    for step in (20, 30):
        Deletion(directory)(str(directory.path / str(step)))
    assert ids(directory) == [(1, 3), (1, 2), (0, 30)]
    assert "30 was not deleted" in caplog.text and "--drop-history 0" in caplog.text
