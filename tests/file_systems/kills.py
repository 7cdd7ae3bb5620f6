"""Publications that are killed before each of their file operations, on a file system that is mounted."""

import os
import shutil
import signal
import sys
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.layout import Layout
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/_core/storage"))
from crasher import die_at_operation

OLDER, OLD, NEW, NEXT = SaveId(0, 6), SaveId(0, 7), SaveId(1, 7), SaveId(1, 8)


def killed_at(number: int, directory: CheckpointDirectory) -> bool:
    """Publish over a checkpoint of the same step, and delete another, in a child; whether it was killed on the way."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_at_operation(number, str(directory.path))
            publish(directory, NEW)
            directory.delete(OLDER)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def let_time_pass(directory: CheckpointDirectory) -> None:
    """Two hours since a writer was killed: without locks, a sweep believes no writer dead any sooner."""
    private = directory.path / ".fastckpt"
    for draft in (*private.glob("tmp-*"), *private.glob("dropped-*")):
        for path in (draft, *draft.rglob("*")):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 7200))


def survive(folder: Path, stride: int) -> int:
    """Kill before every so many of the operations; how often. What is there is always old or new, and whole."""
    number, kills, killed = 1, 0, True
    while killed:
        directory = CheckpointDirectory(folder / str(number) / "dir")
        directory.path.mkdir(parents=True)
        publish(directory, OLDER)
        publish(directory, OLD)
        killed = killed_at(number, directory)
        kills += killed
        found = assert_sound(CheckpointDirectory(directory.path))
        assert found[0] == NEW or (killed and found == [OLD, OLDER]), (number, found)
        let_time_pass(directory)
        directory.sweep()
        assert assert_sound(directory)[0] == found[0]
        publish(directory, NEXT)
        assert assert_sound(directory)[0] == NEXT
        directory.sweep()
        if Layout(directory.path).has_locks():
            assert_clean(directory)
        else:  # what made way counts still, and is deleted in its turn
            kinds = {path.name.partition("-")[0] for path in (directory.path / ".fastckpt").iterdir()}
            assert not kinds & {"tmp", "dropped", "parts"}, kinds
        shutil.rmtree(folder / str(number))
        number += stride
    assert number > 20
    return kills
