"""Folders in an arena: made for its owner alone, and never together with the arena itself."""

from pathlib import Path

import pytest

from fastckpt._core.memory.records import make_folders


def test_folders_below_a_root_are_private(tmp_path: Path):
    for _ in range(2):
        make_folders(tmp_path, tmp_path / "slot-1" / "a" / "b")
    made = [tmp_path / "slot-1", tmp_path / "slot-1/a", tmp_path / "slot-1/a/b"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3


def test_a_root_that_was_removed_is_not_made(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        make_folders(tmp_path / "arena", tmp_path / "arena" / "slot-1")
    assert not (tmp_path / "arena").exists()
