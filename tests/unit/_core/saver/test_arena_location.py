"""Memory of others for the directory of a job."""

import os
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import arena_path
from fastckpt._core.saver.arena_location import report_memory_of_others

OTHER = 77


def test_memory_of_another_user_for_the_same_directory_is_reported_and_no_other(tmp_path: Path, caplog) -> None:
    if os.getuid():
        pytest.skip("only root can change the owner of a file")
    ours, another = (arena_path(str(tmp_path), directory, 0) for directory in ("/run/1", "/run/2"))
    theirs = ours.with_name(ours.name.replace("-0-", f"-{OTHER}-"))
    for path in (ours, another, theirs):
        path.mkdir()
    report_memory_of_others(ours)
    assert caplog.messages == [], "it is named as that of another user, and is not theirs"
    os.chown(theirs, OTHER, OTHER)
    os.chown(another, OTHER, OTHER)
    report_memory_of_others(ours)
    [line] = caplog.messages
    assert line.startswith(f"{theirs} is memory of user {OTHER} for this checkpoint directory")
