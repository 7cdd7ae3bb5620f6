"""Strategies of Flash Checkpoint over real directories; what deletion refuses."""

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.retention import Deletion
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
