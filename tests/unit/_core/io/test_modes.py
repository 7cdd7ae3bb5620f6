"""File modes of checkpoints: by the umask, or as the user chose."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.io import modes
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.share import Share
from tests.e2e.ddp.conftest import said  # noqa: F401 (a fixture)
from tests.unit._core.storage.checkpoints import contribute, images, publish


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)
    modes.choose(None)


def under(path: Path) -> set[tuple[str, str]]:
    """The modes of all files and directories at or below a path."""
    found = [path, *path.rglob("*")]
    kinds = {True: "directory", False: "file"}
    return {(kinds[entry.is_dir()], oct(stat.S_IMODE(entry.lstat().st_mode))) for entry in found}


def everything(path: Path) -> CheckpointDirectory:
    """Checkpoints of all kinds: in their places, where users named them, in the parts of two nodes; with a mark."""
    directory = CheckpointDirectory(path)
    publish(directory, SaveId(0, 1))
    publish(directory, SaveId(0, 2), str(path / "named/deep/model.pt"))
    nested = images(path.with_name("images"), SaveId(0, 3))
    directory.publish(PublishRequest(SaveId(0, 3), nested | {"deep/in/side.pt": nested["rank_0.pt"]}))
    contribute(path.with_name("images"), directory, Share(0, 2), SaveId(0, 4))
    shutil.rmtree(path.with_name("images"))
    directory.mark("1" * 32)
    return directory


def test_files_on_storage_follow_the_umask_or_have_the_chosen_mode(tmp_path: Path):
    for mask, mode, file, folder in (
        (0o027, None, 0o640, 0o750),
        (0, 0o640, 0o640, 0o750),
        (0o077, 0o620, 0o620, 0o720),
    ):
        os.umask(mask)
        modes.choose(mode)
        run = tmp_path / f"{mask:o}-{mode}"
        everything(run)
        assert under(run) == {("file", oct(file)), ("directory", oct(folder))}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directories_made_by_users_keep_their_mode_and_their_files_of_other_names_theirs(tmp_path: Path):
    """A group that is inherited stays so."""
    modes.choose(0o660)
    (tmp_path / "key").touch(0o600)
    for mode in (0o2770, 0o700):
        (run := tmp_path / f"{mode:o}").mkdir()
        run.chmod(mode)
        directory = everything(run)
        assert mode_of(run) == mode
        assert mode_of(run / "checkpoint-1") == 0o770 | mode & 0o2000
        assert mode_of(run / "checkpoint-1/model.pt") == 0o660
        (lock := run / ".fastckpt/writers").unlink()
        lock.hardlink_to(tmp_path / "key")
        publish(directory, SaveId(0, 5))
        assert mode_of(tmp_path / "key") == 0o600


def test_a_file_system_that_refuses_a_mode_keeps_the_checkpoint(tmp_path: Path, monkeypatch, said):  # noqa: F811
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    modes.choose(0o666)
    publish(directory := CheckpointDirectory(tmp_path / "run"), SaveId(0, 1))
    [stored] = directory.checkpoints()
    stored.verify()
    assert "keeps the mode that the file system gave it: " in said.text
