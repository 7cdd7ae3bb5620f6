"""Identity of a directory: another one of the same name is not taken for it."""

import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.identity import identity, mark
from fastckpt.errors import PersistError
from tests.support.small_disks import leave
from tests.unit._core.storage.checkpoints import ids, publish
from tests.unit._core.storage.conftest import at_once

ONE, TWO = "1" * 32, "2" * 32
MARK = ".fastckpt/identity"


def links_refused(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)


def test_the_identity_of_a_directory_lasts_as_long_as_the_directory(tmp_path: Path) -> None:
    first, second, missing = tmp_path / "first", tmp_path / "second", tmp_path / "missing"
    first.mkdir()
    second.mkdir()
    assert identity(first) == "" and not any(first.iterdir()), "who only looks marks nothing"
    assert mark(first, ONE) == mark(first, TWO) == identity(first) == ONE
    assert mark(second, TWO) == TWO
    shutil.rmtree(first / ".fastckpt")
    assert identity(first) == ""
    assert os.listdir(second / ".fastckpt") == ["identity"]
    assert identity(missing) == mark(missing, ONE) == "" and not missing.exists()
    assert CheckpointDirectory(missing).identity() == ("", 0)


def test_a_directory_with_an_unreadable_mark_is_an_error(tmp_path: Path) -> None:
    (tmp_path / MARK).mkdir(parents=True)  # as good as a read error: it is there, and tells nothing
    with pytest.raises(OSError, match="no regular file"):
        mark(tmp_path, ONE)
    with pytest.raises(PersistError, match=r"cannot read the mark in .*identity"):
        CheckpointDirectory(tmp_path).identity()


@pytest.mark.parametrize("number", [0, errno.EPERM])
def test_an_incomplete_mark_is_replaced_and_of_those_by_several_nodes_the_first_wins(tmp_path, monkeypatch, number):
    """Its writer died between its creation and its writing, or the machine did; perhaps without links or locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    (tmp_path / ".fastckpt").mkdir()
    if number:
        links_refused(monkeypatch, number)
    for torn in (None, "", None, ""):
        (tmp_path / MARK).unlink(missing_ok=True) if torn is None else (tmp_path / MARK).write_text(torn)
        said = at_once(3, lambda process: mark(tmp_path, f"{process:032x}"))
        assert set(said) == {identity(tmp_path)} and len(said[0]) == 32
        assert os.listdir(tmp_path / ".fastckpt") == ["identity"]
    if number:
        monkeypatch.setattr(fcntl, "flock", refuse)
    for torn in ("", "12", "\0" * 32, "z" * 70):
        (tmp_path / MARK).write_text(torn)
        assert identity(tmp_path) == ""
        assert mark(tmp_path, ONE) == identity(tmp_path) == mark(tmp_path, TWO) == ONE
        assert os.listdir(tmp_path / ".fastckpt") == ["identity"]


def test_a_full_or_read_only_disk_gets_its_identity_later_and_keeps_no_draft(disk: Path) -> None:
    (disk / ".fastckpt").mkdir()
    (disk / MARK).touch()
    ballast = leave(disk, 0)
    assert mark(disk, ONE) == identity(disk) == ""
    (disk / MARK).unlink()
    assert mark(disk, ONE) == "" and os.listdir(disk / ".fastckpt") == []
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert mark(disk, ONE) == ""
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert mark(disk, TWO) == identity(disk) == TWO


# --- a directory that is known: another one that shows under its name is not written to


def known(path: Path) -> CheckpointDirectory:
    """A directory as the saver of a job knows it that has marked it, and saved in it."""
    path.mkdir(exist_ok=True)
    directory = CheckpointDirectory(path)
    directory.know(directory.mark(ONE))
    publish(directory, SaveId(1, 1))
    return directory


def assert_refused(directory: CheckpointDirectory, why: str = "it has no .fastckpt/identity") -> None:
    refused = rf"is not the directory any more in which this job has saved: {why}.*Mount its file system again.*FC-049"
    with pytest.raises(PersistError, match=refused):
        publish(directory, SaveId(1, 9))
    assert not list(directory.path.glob("checkpoint-9"))


def test_a_directory_whose_mount_is_lost_is_not_written_to_until_it_is_back(disk: Path) -> None:
    """At its mount, and below it."""
    directories = [known(disk), known(disk / "run")]
    (aside := disk.with_name("aside")).mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(aside)], check=True)
    subprocess.run(["umount", str(disk)], check=True)
    try:
        for directory in directories:
            assert_refused(directory)
        assert not [path for path in disk.iterdir() if not path.name.startswith("image-")]
    finally:
        subprocess.run(["mount", "--bind", str(aside), str(disk)], check=True)
        subprocess.run(["umount", str(aside)], check=True)
    for directory in directories:
        publish(directory, SaveId(1, 3))
        assert ids(directory) == [SaveId(1, 3), SaveId(1, 1)]


def test_a_directory_with_another_mark_or_that_somebody_else_made_again_is_not_written_to(tmp_path: Path) -> None:
    """Also behind a link, by what the link leads to."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    path = tmp_path / "run"
    path.symlink_to("first")
    directory = known(path)
    path.unlink()
    path.symlink_to("second")
    assert_refused(directory)
    assert not any((tmp_path / "second").iterdir())
    path.unlink()
    path.symlink_to("first")
    publish(directory, SaveId(1, 2))
    (path / MARK).write_text(TWO)
    assert_refused(directory, "it has another mark")
    assert ids(directory) == [SaveId(1, 2), SaveId(1, 1)]
    (tmp_path / "first").rename(tmp_path / "aside")  # else its inode might come again
    (tmp_path / "first").mkdir()
    assert_refused(directory)
    assert not any(path.iterdir())


def test_a_directory_that_was_emptied_is_written_to_and_one_that_was_removed_gets_its_mark_again(
    tmp_path: Path,
) -> None:
    """By its mark the other nodes, which did not see it go, write there, too."""
    run = tmp_path / "run"
    directory, other = known(run), CheckpointDirectory(run)
    other.know(ONE)
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    publish(directory, SaveId(1, 2))
    assert ids(directory) == [SaveId(1, 2)] and identity(run) == ""
    shutil.rmtree(run)
    (tmp_path / "in its place").mkdir()  # else its inode might come again
    publish(directory, SaveId(1, 3))
    publish(other, SaveId(1, 4))
    assert ids(directory) == [SaveId(1, 4), SaveId(1, 3)] and identity(run) == ONE
