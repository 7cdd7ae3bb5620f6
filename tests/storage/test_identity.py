"""A directory is not another one that takes its name."""

from pathlib import Path

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
