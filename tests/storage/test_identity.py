"""A directory is not another one that takes its name."""

from pathlib import Path

import pytest

from fastckpt.errors import PersistError
from fastckpt.storage.directory import CheckpointDirectory
from fastckpt.storage.identity import identity


def test_it_lasts_as_long_as_the_directory(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    mark = identity(first)
    assert mark
    assert identity(first) == mark
    assert identity(second) != mark


def test_one_that_cannot_be_marked_has_none(tmp_path: Path) -> None:
    assert identity(tmp_path / "missing") == ""


def test_one_whose_mark_cannot_be_read_is_not_one_without(tmp_path: Path) -> None:
    (tmp_path / ".fastckpt/identity").mkdir(parents=True)  # as good as a read error: it is there, and tells nothing
    with pytest.raises(IsADirectoryError):
        identity(tmp_path)
    with pytest.raises(PersistError, match=r"cannot read the mark in .*identity"):
        CheckpointDirectory(tmp_path).identity()
