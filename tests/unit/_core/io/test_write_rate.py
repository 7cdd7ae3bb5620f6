"""The rate of a directory is measured, and nothing is left of it."""

from pathlib import Path

import pytest

from fastckpt._core.io import write_rate as module
from fastckpt._core.io.write_rate import write_rate


@pytest.mark.parametrize("size", [1, 5000, 40 << 20])
def test_writes_have_a_rate_and_leave_nothing(tmp_path: Path, size: int):
    assert write_rate(tmp_path, size) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_a_name_is_left_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the file system has no nameless files: asked for with a flag that none has."""
    monkeypatch.setattr(module.os, "O_TMPFILE", module.os.O_DIRECTORY)
    assert write_rate(tmp_path, 5000) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_nothing_is_an_error(tmp_path: Path):
    with pytest.raises(OSError, match="none"):
        write_rate(tmp_path / "none", 5000)
